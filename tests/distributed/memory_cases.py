"""What ranks run in the tests of memory: the largest steps, and allocations that fail."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ep_runtime.engine.epoch import open_head, open_worker
from ep_runtime.engine.executor import Executor
from model.base import Communicator
from model.batch import ForwardBatch, ForwardOutput
from model.state.registry import StateRegistry
from protocol.commands import Alloc, Loops
from protocol.errors import EpLinkLost
from protocol.frame import Frame
from protocol.slots import Change, SlotTable
from tests.support.allocations import peak_bytes
from tests.support.engine import Driver, head_of, load, meeting
from tests.support.rank_context import RankContext

EVERYTHING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {5: 1.0},
    "logprobs": 20,
    "prompt_logprobs": 20,
}


def _drive_largest(driver: Driver, loops: int) -> None:
    """Fill every slot with long sequences that ask for everything, all but the last decoding while it scores its prompt.

    Of more than one loop a prompt is one piece, of which no more rows are scored than of any step.
    """
    limits = driver.scheduler.limits
    long = limits.max_model_len - 20
    asked: dict[str, Any] = EVERYTHING if loops == 1 else EVERYTHING | {"loops": Loops(loops)}
    for number in range(limits.max_slots - 1):
        driver.submit(f"decodes {number}", [5 + number % 7] * long, max_tokens=8, **(asked | {"prompt_logprobs": None}))
    while any(not answer.tokens for answer in driver.answers.values()):
        driver.turn()
    driver.submit("scores", [5] * (long if loops == 1 else min(long, limits.max_scored_rows)), max_tokens=2, **asked)
    driver.turn()
    driver.submit("prefills", [7] * long, max_tokens=2, **(asked if loops == 1 else asked | {"prompt_logprobs": None}))
    driver.finish()


def largest_step(ctx: RankContext, *, folder: str, loops: int = 1, **settings: Any) -> tuple[int, int]:
    """This rank's peak over the largest steps, with so many loops, and the plan's line for them."""
    rank = load(ctx, folder, load_format="dummy", **settings)
    planned = next(size for what, size in rank.plan.lines if what.startswith("scratch"))
    with meeting(ctx) as (place, listener):
        if ctx.rank != 0:
            epoch, worker, link = open_worker(rank, place, lambda: False)
            with closing(epoch), closing(link):
                return peak_bytes(lambda: worker.run(epoch.slots)), planned
        epoch, broadcaster, links = open_head(rank, place, listener, lambda: False)
        with closing(epoch), closing(links):
            driver = Driver(rank, epoch, broadcaster, lookahead=False, digest_interval=4)
            peak = peak_bytes(lambda: _drive_largest(driver, loops))
            driver.shutdown()
            return peak, planned


HUNGRY = 77
"""A token whose forward asks for more memory than there is."""

TOO_MUCH = 1 << 40
"""Bytes that no process of a test has freed and its C library kept: under a limit, they can't be had."""


@contextmanager
def memory_limit(spare: int) -> Iterator[None]:
    """This process may take `spare` bytes of address space more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _hungry(executor: Executor) -> None:
    """Have every forward of a HUNGRY token ask the allocator for a TiB where 256 MiB are left."""
    forward = executor._model.forward

    def failing(batch: ForwardBatch, state: StateRegistry, comm: Communicator) -> ForwardOutput:
        output = forward(batch, state, comm)
        if bool((batch.token_ids == HUNGRY).any()):
            with memory_limit(256 << 20):
                torch.empty(TOO_MUCH, dtype=torch.uint8)
        return output

    executor._model.forward = failing  # type: ignore[method-assign]


def runs_out(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], ranks: list[int], **settings: Any) -> Any:
    """The requests together, while memory runs out on `ranks` for HUNGRY tokens: the answers, or how the epoch ended."""

    def arrange(executor: Executor) -> None:
        if ctx.rank in ranks:
            _hungry(executor)

    try:
        with head_of(ctx, folder, arrange=arrange, **settings) as driver:
            if driver is None:
                return None
            for number, request in enumerate(requests):
                driver.submit(str(number), **request)
            driver.finish()
            return [asdict(driver.answers[str(number)]) for number in range(len(requests))]
    except EpLinkLost as error:
        return f"{type(error).__name__}: {error} / {error.__cause__}"


def too_large_a_step(ctx: RankContext, *, folder: str, spare: int, **settings: Any) -> Any:
    """On one rank: the same requests without and with a limit, under which one request's logits have no room."""
    good: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 20}
    with head_of(ctx, folder, load_format="dummy", **settings) as driver:
        assert driver is not None
        driver.submit("before", **good)
        driver.finish()
        with memory_limit(spare):
            driver.submit("beside", **good)
            driver.submit("large", [9] * 400, max_tokens=4, prompt_logprobs=1)
            driver.finish()
        driver.submit("after", [9] * 400, max_tokens=4, prompt_logprobs=1)
        driver.finish()
        return {name: asdict(answer) for name, answer in driver.answers.items()}


def cannot_reserve(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], nth: int, **settings: Any) -> Any:
    """The last rank alone has no memory to prepare its `nth` ALLOC: the answers."""

    def arrange(executor: Executor) -> None:
        prepare, seen = executor.prepare, 0

        def failing(frame: Frame, slots: SlotTable) -> Change:
            nonlocal seen
            change = prepare(frame, slots)
            if isinstance(frame.command, Alloc) and ctx.rank == ctx.world - 1:
                seen += 1
                if seen == nth:
                    with memory_limit(256 << 20):
                        torch.empty(TOO_MUCH, dtype=torch.uint8)
            return change

        executor.prepare = failing  # type: ignore[method-assign]

    with head_of(ctx, folder, arrange=arrange, **settings) as driver:
        if driver is None:
            return None
        for number, request in enumerate(requests):
            driver.submit(str(number), **request)
        driver.finish()
        return [asdict(driver.answers[str(number)]) for number in range(len(requests))]
