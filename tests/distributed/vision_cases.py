"""What ranks run in the tests of images: the head's commands by hand, and ranks that cannot or do not hold the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ep_runtime.engine.executor import Choose, Executor
from protocol.commands import BATCH, Alloc, Digest, Free, PrefillChunk, Span, Vision, VisionGrid, Wanted
from protocol.errors import EpCommandFailed, EpLinkLost
from protocol.frame import Frame
from protocol.preamble import RECORD_ROUTING
from protocol.sections import unpack_sections
from protocol.slots import Change, SlotTable
from tests.support.engine import Driver, head_of
from tests.support.rank_context import RankContext
from tests.support.vision_checkpoints import IMAGE

GRIDS = [VisionGrid(3, 2, 4), VisionGrid(11, 1, 2), VisionGrid(20, 3, 3)]
"""Positions 3 to 10, right behind it 11 and 12, and 20 to 28."""
ROWS = 19
LENGTH = 32
PROMPT = [IMAGE if any(grid.start <= place < grid.stop for grid in GRIDS) else 5 + place for place in range(LENGTH)]


def alloc(driver: Driver) -> None:
    """Slot 0 for PROMPT."""
    driver.broadcaster.run(Alloc(token_budget=40, prompt_length=LENGTH), 0)


def show(driver: Driver) -> None:
    """VISION of slot 0, with random rows."""
    executor = driver.epoch.executor
    width = executor.rows._width
    executor.offer_rows(torch.randn(ROWS, width, generator=torch.Generator().manual_seed(7)))
    driver.broadcaster.run(Vision(grids=GRIDS, rows=ROWS), 0)


def prefill(driver: Driver, stop: int, tokens: list[int] | None = None) -> None:
    """The prompt of slot 0 up to `stop`, recorded for DIGEST."""
    state = driver.epoch.slots[0]
    assert state is not None
    size = driver.epoch.limits.block_size
    start, held = state.length, len(state.blocks)
    blocks = list(range(held, -(-stop // size)))
    command = PrefillChunk(spans=[Span(0, start, stop - start, False, False, Wanted.NONE, blocks)])
    given = PROMPT[start:stop] if tokens is None else tokens
    driver.broadcaster.run(command, BATCH, tokens=given, flags=RECORD_ROUTING)


def compare(driver: Driver) -> dict[str, str]:
    """DIGEST: the head's sections, when all ranks have the same."""
    driver.broadcaster.run(Digest(), BATCH)
    return unpack_sections(driver.epoch.executor.digest(driver.epoch.slots).text)


def failure(run: Callable[[], None]) -> str:
    """The message of the EpCommandFailed that `run` raises."""
    try:
        run()
    except EpCommandFailed as error:
        return str(error)
    return "nothing was refused"


def embeds(ctx: RankContext, *, folder: str, chunks: list[int], **settings: Any) -> Any:
    """A prompt with images in chunks that end at `chunks`, all ranks compared after each: the digests of what enters layer 0."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        alloc(driver)
        show(driver)
        found = []
        for stop in chunks:
            prefill(driver, stop)
            found.append(compare(driver)["inputs"])
        driver.epoch.executor.rows.check_integrity(driver.epoch.slots)
        driver.broadcaster.run(Free(), 0)
        return found


def no_room(ctx: RankContext, *, folder: str, rank: int, **settings: Any) -> Any:
    """One rank cannot reserve the rows of the first VISION. What each rank held after every command, and the head's refusal."""
    held: list[tuple[str, int]] = []

    def arrange(executor: Executor) -> None:
        reserve, execute, tries = executor.rows.reserve, executor.execute, 0

        def failing(rows: int) -> None:
            nonlocal tries
            tries += 1
            if ctx.rank == rank and tries == 1:
                raise torch.OutOfMemoryError("out of memory: tried to allocate rows")
            reserve(rows)

        def watching(frame: Frame, change: Change, slots: SlotTable, choose: Choose) -> None:
            execute(frame, change, slots, choose)
            held.append((frame.command.cmd.name, executor.rows.nbytes))

        executor.rows.reserve = failing  # type: ignore[method-assign]
        executor.execute = watching  # type: ignore[method-assign]

    said = ""
    with head_of(ctx, folder, arrange=arrange, **settings) as driver:
        if driver is not None:
            alloc(driver)
            said = failure(lambda: show(driver))
            compare(driver)
            driver.broadcaster.run(Free(), 0)
            compare(driver)  # while nothing is held, what is reserved is found, too
            alloc(driver)
            show(driver)
            prefill(driver, LENGTH)
            compare(driver)
            driver.broadcaster.run(Free(), 0)
    return said, held


def refusals(ctx: RankContext, *, folder: str, **settings: Any) -> Any:
    """What every rank must refuse, each followed by a comparison of all ranks; then the same prompt as it should be."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        executor, run = driver.epoch.executor, driver.broadcaster.run

        def miscounted(rows: int) -> Callable[[], None]:
            def offered() -> None:
                executor.offer_rows(torch.zeros(rows, executor.rows._width))
                run(Vision(grids=GRIDS, rows=rows), 0)

            return offered

        alloc(driver)
        said = {"no rows": failure(lambda: prefill(driver, 10)), "before": compare(driver)["slots"]}
        said["a row too few"] = failure(miscounted(ROWS - 1))
        said["a row too many"] = failure(miscounted(ROWS + 1))
        said["after"] = compare(driver)["slots"]
        show(driver)
        said["text in an image"] = failure(lambda: prefill(driver, 6, [5, 6, 7, IMAGE, 8, IMAGE]))
        prefill(driver, LENGTH)
        compare(driver)
        run(Free(), 0)
        return said


def withheld(ctx: RankContext, *, folder: str, rank: int, stop: int, bypass: bool, **settings: Any) -> Any:
    """One rank loses the rows right after VISION. Each rank's error, of a prefill to `stop` and a comparison of all ranks.

    With `bypass`, that rank's refusal of such a prefill is out of order.
    """

    def arrange(executor: Executor) -> None:
        if ctx.rank != rank:
            return
        execute = executor.execute

        def losing(frame: Frame, change: Change, slots: SlotTable, choose: Choose) -> None:
            execute(frame, change, slots, choose)
            if isinstance(frame.command, Vision):
                executor.rows.drop(0)

        executor.execute = losing  # type: ignore[method-assign]
        if bypass:
            executor.rows.check_held = lambda *_: None  # type: ignore[method-assign]

    try:
        with head_of(ctx, folder, arrange=arrange, **settings) as driver:
            if driver is None:
                return "the epoch ended in order"
            alloc(driver)
            show(driver)
            if stop:
                prefill(driver, stop)
            compare(driver)
            return "nothing was noticed"
    except EpLinkLost as error:
        return f"{type(error).__name__}: {error}"
