"""What ranks run in the tests of edges and traps; every function runs on every rank of a job, and rank 0 drives."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import asdict, replace
from random import Random
from typing import Any

import torch

from ep_runtime.engine.epoch import open_head, open_worker
from ep_runtime.engine.executor import Choose, Executor
from ep_runtime.scheduler.core import Sequence
from ep_runtime.scheduler.owner import Owner
from model.base import Communicator
from model.batch import ForwardBatch, ForwardOutput
from model.state.registry import StateRegistry
from protocol.commands import BATCH, Alloc, Digest, Free, Ping, Span, Wanted, forward_command
from protocol.errors import EpCommandFailed, EpLinkLost
from protocol.frame import Frame
from protocol.messages import Abort, Mask, SamplingParams, Submit
from protocol.slots import Change, SlotStatus, SlotTable
from tests.distributed.chaos_cases import grammar_mask
from tests.support.engine import Driver, head_of, load, meeting
from tests.support.rank_context import RankContext

GOOD: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 8}


def _params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 0, "temperature": 0.0, "ignore_eos": True, "max_tokens": 4, **fields})


def _answers(driver: Driver) -> dict[str, Any]:
    return {request_id: asdict(answer) for request_id, answer in driver.answers.items()}


def hostile(ctx: RankContext, *, folder: str, bad: dict[str, dict[str, Any]], **settings: Any) -> Any:
    """A good request beside submissions that no frontend should have let pass: all answers."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        driver.submit("good", **GOOD)
        for name, fields in bad.items():
            message = {"prompt": [5], **{k: v for k, v in fields.items() if k != "sampling"}}
            driver.send(Submit(request_id=name, group=name, sampling=_params(**fields.get("sampling", {})), **message))
            driver.turn()
        driver.finish()
        return _answers(driver)


def ids_used_again(ctx: RankContext, *, folder: str, **settings: Any) -> Any:
    """An id that is submitted twice, and one that is used again in the same breath as its abort: the ends of each, in order."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        ends: list[tuple[str, str]] = []
        driver.on_update = lambda update: ends.append((update.request_id, update.finish)) if update.finish else None
        driver.submit("twice", **GOOD)
        driver.submit("again", **GOOD)
        driver.turn()
        driver.turn()
        first = driver.answers["twice"]
        driver.port.send(Submit(request_id="twice", group="twice", prompt=[9] * 30, sampling=_params()))
        driver.port.send(Abort(["again"]))
        driver.port.send(Submit(request_id="again", group="again", prompt=[5, 6, 7], sampling=_params(max_tokens=3)))
        while len(ends) < 3:
            driver.turn()
        return {"ends": ends, "tokens": first.tokens}


def ragged_mask(ctx: RankContext, *, folder: str, **settings: Any) -> Any:
    """A mask that is no bitmask comes in the middle of a request, beside a good one."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        params = _params(max_tokens=8, grammar=True)
        driver.submit("good", **GOOD)
        driver.send(Submit("bad", "bad", [5, 6], params, mask=grammar_mask([5, 6], [])))

        def answer(update: Any) -> None:
            if update.request_id == "bad" and update.finish is None:
                driver.port.send(Mask("bad", len(driver.answers["bad"].tokens), b"abc"))

        driver.on_update = answer
        driver.finish()
        return _answers(driver)


def alloc_fails_in_execute(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], **settings: Any) -> Any:
    """The second ALLOC passes its vote and then fails alike on every rank, after the slot was filled: the answers."""

    def arrange(executor: Executor) -> None:
        zero, seen = executor._state.zero_slot, 0

        def failing(slot: int) -> None:
            nonlocal seen
            seen += 1
            if seen == 2:
                raise MemoryError("no room, alike")
            zero(slot)

        executor._state.zero_slot = failing  # type: ignore[method-assign]

    with head_of(ctx, folder, arrange=arrange, **settings) as driver:
        if driver is None:
            return None
        for number, request in enumerate(requests):
            driver.submit(str(number), **request)
        driver.finish()
        return _answers(driver)


def poisoned(ctx: RankContext, *, folder: str, **settings: Any) -> Any:
    """A forward fails alike, with the ranks' recurrent state in different places: what the slot allows, and what DIGEST says."""

    def arrange(executor: Executor) -> None:
        forward = executor._model.forward

        def failing(batch: ForwardBatch, state: StateRegistry, comm: Communicator) -> ForwardOutput:
            if bool((batch.token_ids == 77).any()):
                spec = state.spec.states[-1]
                state.recurrent(spec.layer, spec.name)[3] += ctx.rank
                raise ValueError("half way")
            return forward(batch, state, comm)

        executor._model.forward = failing  # type: ignore[method-assign]

    with head_of(ctx, folder, arrange=arrange, **settings) as driver:
        if driver is None:
            return None
        run = driver.broadcaster.run
        run(Alloc(token_budget=20), 3)
        said = []
        for start, tokens, new_blocks in ((0, [131], [0]), (0, [77], [0]), (1, [5], [])):
            try:
                run(forward_command([Span(3, start, 1, False, False, Wanted.NONE, new_blocks)]), BATCH, tokens=tokens)
            except EpCommandFailed as error:
                said.append(str(error))
            state = driver.epoch.slots[3]
            assert state is not None
            said.append(state.status.name)
        run(Digest(), BATCH)
        run(Free(), 3)
        assert driver.epoch.slots[3] is None
        driver.submit("good", **GOOD)
        driver.finish()
        return said, SlotStatus.POISONED.name, _answers(driver)["good"]


def late_submission(ctx: RankContext, *, folder: str, **settings: Any) -> Any:
    """A request that arrives when the engine ends, beside one that runs: the answers."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        driver.submit("runs", prompt=[5], max_tokens=100)
        driver.turn()
        driver.submit("late", **GOOD)
        driver.head.shutdown()
        driver.shutdown = lambda: None  # type: ignore[method-assign]
        return _answers(driver)


def lost_while_waiting(ctx: RankContext, *, folder: str, **settings: Any) -> Any:
    """A grammar's mask never comes, and meanwhile a worker is lost: the head's error."""

    def arrange(executor: Executor) -> None:
        execute = executor.execute

        def leaving(frame: Frame, change: Change, slots: SlotTable, choose: Choose) -> None:
            if ctx.rank != 0 and isinstance(frame.command, Ping):
                os._exit(0)
            execute(frame, change, slots, choose)

        executor.execute = leaving  # type: ignore[method-assign]

    try:
        with head_of(ctx, folder, arrange=arrange, **settings) as driver:
            if driver is None:
                return None
            driver.send(Submit("bad", "bad", [5, 6], _params(grammar=True), mask=grammar_mask([5, 6], [])))
            end = time.monotonic() + 20
            while time.monotonic() < end:
                driver.turn()
            return "nothing was noticed"
    except EpLinkLost as error:
        return f"{type(error).__name__}: {error}"


def different_offers(ctx: RankContext, *, folder: str, offers: list[int], **settings: Any) -> Any:
    """Each rank has room for another number of blocks: the number that each rank has in the end, and an answer."""
    rank = load(ctx, folder, **settings)
    rank = replace(rank, plan=replace(rank.plan, num_blocks=offers[ctx.rank]))
    with meeting(ctx) as (place, listener):
        if ctx.rank != 0:
            epoch, worker, link = open_worker(rank, place, lambda: False)
            with closing(epoch), closing(link):
                worker.run(epoch.slots)
                return epoch.limits.num_blocks, None
        epoch, broadcaster, links = open_head(rank, place, listener, lambda: False)
        with closing(epoch), closing(links):
            driver = Driver(rank, epoch, broadcaster, lookahead=False, digest_interval=1)
            driver.submit("0", **GOOD)
            driver.finish()
            driver.shutdown()
            return epoch.limits.num_blocks, _answers(driver)["0"]


def different_flags(ctx: RankContext, *, folder: str, flags: list[dict[str, Any]], **settings: Any) -> Any:
    """Each rank was started with settings of its own: how each one's epoch ends."""
    try:
        with head_of(ctx, folder, **settings | flags[ctx.rank]):
            return "the epoch was formed"
    except EpLinkLost as error:
        return f"{type(error).__name__}: {error}"


def leaves_in_a_forward(ctx: RankContext, *, folder: str, leaver: int, **settings: Any) -> Any:
    """One rank's process ends with status 0 while the others wait for it in a collective: what they see, after their teardown."""

    def arrange(executor: Executor) -> None:
        reduce, count = executor.comm.reduce, 0

        def leaving(partial: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            if ctx.rank == leaver and count == 5:
                os._exit(0)
            return reduce(partial)

        executor.comm.reduce = leaving  # type: ignore[method-assign]

    try:
        with head_of(ctx, folder, arrange=arrange, **settings) as driver:
            if driver is None:
                return "left in order"
            driver.submit("0", prompt=[5, 6, 7], max_tokens=50)
            driver.finish()
            return "nothing was noticed"
    except EpLinkLost as error:
        return type(error).__name__


def rows_out_of_slot_order(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], **settings: Any) -> Any:
    """Slots are freed and taken again while others run on: the answers, and how many batches had rows not in slot order."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        plan, unsorted = driver.scheduler.plan, 0

        def recording() -> Any:
            nonlocal unsorted
            made = plan()
            slots = [span.slot for span in made.spans] if made is not None else []
            unsorted += slots != sorted(slots)
            return made

        driver.scheduler.plan = recording  # type: ignore[method-assign]
        for number, request in enumerate(requests):
            driver.submit(str(number), **request)
        driver.finish()
        return {"answers": list(_answers(driver).values()), "unsorted": unsorted}


def count_collectives(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], **settings: Any) -> Any:
    """The answers, and how many commands and collectives the whole job took."""
    with head_of(ctx, folder, digest_interval=0, **settings) as driver:
        if driver is None:
            return None
        before = driver.epoch.executor.comm.launched, driver.broadcaster.step
        for number, request in enumerate(requests):
            driver.submit(str(number), **request)
        driver.finish()
        after = driver.epoch.executor.comm.launched, driver.broadcaster.step
        return {
            "answers": list(_answers(driver).values()),
            "collectives": after[0] - before[0],
            "commands": after[1] - before[1],
        }


def _by_lot(driver: Driver, lots: Random) -> dict[str, int]:
    """From now on the head draws the blocks that it gives out and how much of a known prefix it uses; what it drew, counted."""
    drawn = {"blocks": 0, "prefixes": 0}

    def arrange(owner: Owner) -> None:
        pool, take, match = owner.blocks, owner.blocks.take, owner.tree.match

        def drawing() -> int:
            lots.shuffle(pool._free)
            for block in lots.sample(list(pool._evictable), len(pool._evictable)):
                pool._evictable.move_to_end(block)
            lowest = min((block for block in range(pool.total) if not pool.references(block)), default=None)
            block = take()
            drawn["blocks"] += block != lowest
            return block

        def shortened(seq: Sequence, limit: int) -> list[int]:
            known = match(seq, limit)
            used = known[: lots.randint(0, len(known))]
            drawn["prefixes"] += 0 < len(used) < len(known)
            return used

        pool.take = drawing  # type: ignore[method-assign]
        owner.tree.match = shortened  # type: ignore[method-assign]

    for owner in driver.scheduler._life.owners:
        arrange(owner)
    return drawn


def drawn_by_lot(ctx: RankContext, *, folder: str, waves: list[list[dict[str, Any]]], **settings: Any) -> Any:
    """Waves of requests while the head draws by lot what ranks could guess of its pool and tree; they are compared every step."""
    with head_of(ctx, folder, digest_interval=1, enable_prefix_caching=True, **settings) as driver:
        if driver is None:
            return None
        drawn = _by_lot(driver, Random(5))
        for wave, requests in enumerate(waves):
            for number, request in enumerate(requests):
                driver.submit(f"{wave}.{number}", **request)
            driver.finish()
        return {"answers": list(_answers(driver).values()), "preemptions": driver.scheduler.stats().preemptions, **drawn}
