"""What ranks run in the tests of divergence; every function runs on every rank of a job, and rank 0 drives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ep_runtime.engine.digest import StateDigest
from ep_runtime.engine.executor import Executor
from protocol.commands import Body
from protocol.errors import EpLinkLost
from protocol.messages import SamplingParams, Submit
from protocol.slots import SlotTable
from tests.support.engine import Driver, head_of
from tests.support.rank_context import RankContext


class Lines(logging.Handler):
    """Keeps what this rank says of its slot table."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """One message."""
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def alter(section: str, executor: Executor, slots: SlotTable) -> None:
    """Change one thing of slot 0 behind the runtime's back."""
    state = slots[0]
    assert state is not None
    match section:
        case "slots":
            state.token_budget += 1
        case "lengths":
            state.length += 1
        case "blocks":
            state.blocks[0] = 7
        case "routing" | "inputs" | "outputs":
            executor._recorded[section] = executor._recorded[section] ^ 1
        case name:
            spec = next(spec for spec in executor._state.spec.states if spec.name == name)
            executor._state.recurrent(spec.layer, name)[0].view(-1)[3] += 1e-3


def diverge(ctx: RankContext, *, folder: str, section: str, rank: int, **settings: Any) -> Any:
    """One thing differs on one rank when the ranks are compared: each rank's error, and what it logged."""
    heard = Lines()
    logger = logging.getLogger("ep_runtime.engine.digest")

    def arrange(executor: Executor) -> None:
        digest = executor.digest

        def altered(slots: SlotTable) -> StateDigest:
            if ctx.rank == rank and slots[0] is not None and slots[0].length > 6:
                alter(section, executor, slots)
            return digest(slots)

        executor.digest = altered  # type: ignore[method-assign]

    logger.addHandler(heard)
    try:
        with head_of(ctx, folder, arrange=arrange, digest_interval=1, **settings) as driver:
            if driver is not None:
                driver.submit("0", prompt=[5, 6, 7], max_tokens=30)
                driver.finish()
        return "nothing was noticed", heard.lines
    except EpLinkLost as error:
        return f"{type(error).__name__}: {error}", heard.lines
    finally:
        logger.removeHandler(heard)


def _lose_a_block(driver: Driver) -> None:
    driver.scheduler._life.owners[0].blocks._free.pop()


def _ghost(driver: Driver) -> None:
    driver.head.requests.add(Submit("ghost", "ghost", [5], SamplingParams(seed=0, max_tokens=1)))


def _sampling_slot(driver: Driver) -> None:
    driver.head._launcher.sampling_slots.add(2)


def _penalty_row(driver: Driver) -> None:
    driver.sampler._penalties.take([5], [])


DAMAGE: dict[str, Callable[[Driver], None]] = {
    "nothing": lambda driver: None,
    "block": _lose_a_block,
    "ghost": _ghost,
    "slot": _sampling_slot,
    "penalties": _penalty_row,
}


def idle(ctx: RankContext, *, folder: str, damage: str, **settings: Any) -> Any:
    """Work, then rest: the commands of the resting head by name, and the error if it ends the epoch."""
    with head_of(ctx, folder, **settings, digest_interval=0) as driver:
        if driver is None:
            return None
        names: list[str] = []
        run = driver.broadcaster.run

        def recording(command: Body, *args: Any, **kwargs: Any) -> None:
            names.append(command.cmd.name)
            run(command, *args, **kwargs)

        driver.broadcaster.run = recording  # type: ignore[method-assign]
        said = ""
        for _ in range(2):
            driver.submit("0", prompt=[5, 6, 7], max_tokens=3)
            driver.finish()
            names.append("rest")
            DAMAGE[damage](driver)
            for _ in range(3):
                # A second goes by.
                driver.head._upkeep._last_command -= 1.1
                try:
                    driver.head.turn(0.0)
                except EpLinkLost as error:
                    said = f"{type(error).__name__}: {error}"
                    break
            if said:
                # What is damaged cannot be empty after it.
                driver.shutdown = driver.head.shutdown  # type: ignore[method-assign]
                break
        return list(names), said


def wrong_index(ctx: RankContext, *, folder: str, **settings: Any) -> Any:
    """The last rank's index of blocks is wrong while nothing is held: how the epoch ends."""

    def arrange(executor: Executor) -> None:
        digest = executor.digest

        def damaged(slots: SlotTable) -> StateDigest:
            if ctx.rank == ctx.world - 1:
                slots.users[3] += 1
            return digest(slots)

        executor.digest = damaged  # type: ignore[method-assign]

    try:
        with head_of(ctx, folder, arrange=arrange, digest_interval=0, **settings) as driver:
            if driver is None:
                return None
            driver.submit("0", prompt=[5, 6, 7], max_tokens=3)
            driver.finish()
            driver.head._upkeep._last_command -= 1.1
            driver.turn()
            return "nothing was noticed"
    except EpLinkLost as error:
        return f"{type(error).__name__}: {error}"
