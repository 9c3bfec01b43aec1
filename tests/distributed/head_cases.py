"""What ranks run in the tests of the head's dealings with its frontend: masks, congestion, broken messages, closed epochs."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from ep_runtime.engine.executor import Choose, Executor
from ep_runtime.engine.port import FrontendLost, Undecodable
from protocol.commands import Body, Forward
from protocol.errors import EpEpochClosed
from protocol.frame import Frame
from protocol.messages import Mask, SamplingParams, Submit
from protocol.progress import Phase
from protocol.slots import Change, SlotTable
from tests.distributed.chaos_cases import grammar_mask
from tests.support.engine import Driver, head_of
from tests.support.rank_context import RankContext


def _grammar(driver: Driver, name: str, prompt: list[int], max_tokens: int) -> None:
    params = SamplingParams(seed=0, temperature=0.0, ignore_eos=True, max_tokens=max_tokens, grammar=True)
    driver.send(Submit(name, name, prompt, params, mask=grammar_mask(prompt, [])))


def _answers(driver: Driver) -> dict[str, Any]:
    return {name: asdict(answer) for name, answer in driver.answers.items()}


def _counting(driver: Driver) -> list[str]:
    """The names of the commands that the head runs from now on."""
    names: list[str] = []
    run = driver.broadcaster.run

    def recording(command: Body, *args: Any, **kwargs: Any) -> None:
        names.append(command.cmd.name)
        run(command, *args, **kwargs)

    driver.broadcaster.run = recording  # type: ignore[method-assign]
    return names


def late_mask(ctx: RankContext, *, folder: str, plain: list[dict[str, Any]], comes: bool, **settings: Any) -> Any:
    """A grammar's second mask is late while others decode to their end; then it comes, or its time passes."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        _grammar(driver, "masked", [5, 6, 7], 3)
        for number, request in enumerate(plain):
            driver.submit(str(number), **request)
        while any(answer.finish is None for name, answer in driver.answers.items() if name != "masked"):
            driver.turn()
        before = len(driver.answers["masked"].tokens), driver.answers["masked"].finish
        driver.head._inbox.mask_deadline_s = 0.02
        if comes:
            driver.head._inbox.mask_deadline_s = 30.0
            while driver.answers["masked"].finish is None:
                tokens = driver.answers["masked"].tokens
                driver.send(Mask("masked", len(tokens), grammar_mask([5, 6, 7], tokens)))
                driver.turn()
        driver.finish(limit=10**9)
        return before, _answers(driver)


def congested(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], **settings: Any) -> Any:
    """The way to the frontend is full for a while: the commands meanwhile, the page's phase, and the answers in the end."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        _grammar(driver, "masked", [5, 6, 7], 3)
        for number, request in enumerate(requests):
            driver.submit(str(number), **request)
        for _ in range(3):
            driver.turn()
        names = _counting(driver)
        driver.port.congested = True
        driver.head._inbox.mask_deadline_s = 0.01
        pings = 0
        for _ in range(20):
            driver.turn()
            driver.head._upkeep._last_command -= 0.6
            pings += driver.page.read().phase is Phase.WAITING
        stalled = list(names)
        time.sleep(0.02)
        driver.port.congested = False
        driver.head._inbox.mask_deadline_s = 30.0
        while driver.answers["masked"].finish is None:
            tokens = driver.answers["masked"].tokens
            driver.send(Mask("masked", len(tokens), grammar_mask([5, 6, 7], tokens)))
            driver.turn()
        driver.finish()
        return {"stalled": stalled, "in_flight": len(driver.head._in_flight), "waiting": pings, "answers": _answers(driver)}


def congested_shutdown(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], **settings: Any) -> Any:
    """The engine ends while nobody takes results: every request has its end all the same."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        for number, request in enumerate(requests):
            driver.submit(str(number), **request)
        for _ in range(3):
            driver.turn()
        driver.port.congested = True
        driver.head.shutdown()
        driver.shutdown = lambda: None  # type: ignore[method-assign]
        return _answers(driver)


def broken_messages(ctx: RankContext, *, folder: str, **settings: Any) -> Any:
    """Messages that do not decode: of a new request, of a live one, of one that is over."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        for name in ("alive", "broken mask", "over"):
            driver.submit(name, [5, 6, 7], max_tokens=1 if name == "over" else 6)
        while driver.answers["over"].finish is None:
            driver.turn()
        driver.answers["new"] = type(driver.answers["over"])()
        for name, kind in (
            ("new", "Submit"),
            ("alive", "Submit"),
            ("broken mask", "Mask"),
            ("over", "Mask"),
        ):
            driver.port.send(Undecodable(name, kind, f"message: {kind} of {name}"))  # type: ignore[arg-type]
        driver.finish()
        return _answers(driver)


def frontend_lost(ctx: RankContext, *, folder: str, **settings: Any) -> Any:
    """The frontend goes away with requests that run, wait in the queue, and wait for a mask; the next one's request follows."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        _grammar(driver, "masked", [5, 6, 7], 5)
        for number in range(6):
            driver.submit(f"old {number}", [5, 6, 7 + number], max_tokens=60)
        for _ in range(6):
            driver.turn()
        driver.port.send(FrontendLost())  # type: ignore[arg-type]
        driver.submit("next", [5, 6, 7], max_tokens=8)
        steps = driver.broadcaster.step
        driver.finish()
        return driver.broadcaster.step - steps, _answers(driver)


def closed_in_flight(ctx: RankContext, *, folder: str, at: int, **settings: Any) -> Any:
    """The epoch is closed while the forward number `at` runs: what has been answered, and how the head ended."""
    drivers: list[Driver] = []
    forwards = 0

    def arrange(executor: Executor) -> None:
        execute = executor.execute

        def closing(frame: Frame, change: Change, slots: SlotTable, choose: Choose) -> None:
            nonlocal forwards
            execute(frame, change, slots, choose)
            forwards += isinstance(frame.command, Forward)
            if forwards == at and drivers:
                drivers[0].closed = "rank 1 was killed"

        executor.execute = closing  # type: ignore[method-assign]

    try:
        with head_of(ctx, folder, arrange=arrange, **settings) as driver:
            assert driver is not None
            drivers.append(driver)
            driver.submit("0", [5, 6, 7], max_tokens=20)
            driver.finish()
            return "nothing happened"
    except EpEpochClosed as error:
        return str(error), forwards, drivers[0].answers["0"].tokens
