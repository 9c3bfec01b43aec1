"""A command whose outcomes on other ranks are judged later: what waits for them, and what is found where."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from ep_runtime.engine.broadcast import Broadcaster
from ep_runtime.engine.pending import PendingStep
from protocol.ack import Ack, AckStatus, ErrorCode
from protocol.channel import Channel, never_closed
from protocol.commands import BATCH, Body, Decode, Ping, Span, Wanted
from protocol.errors import EpCommandFailed, EpDeadline, EpDiverged, EpPeerGone, EpRankFailed
from protocol.frame import decode
from protocol.links import HeadLinks, WorkerLink
from protocol.progress import Phase, ProgressPage
from protocol.slots import Change, SlotLimits, SlotTable
from tests.support.checkpoints import make_checkpoint
from tests.support.engine import head_of
from tests.support.rank_context import RankContext

CONTEXT = RankContext(rank=0, world=1, epoch=0, store_port=0, store_fd=None, runtime_dir=Path(), kwargs={})
STEP = Decode(spans=[Span(0, 3, 1, fed=True, sampled=True, wanted=Wanted.LAST, new_blocks=[])])
LONG_S = 20.0
LIMITS = SlotLimits(max_slots=1, num_blocks=1, block_size=4, max_length=4, max_rows=4)


class Rank0:
    """An executor that runs nothing, or fails with `error`; each command launches one collective."""

    def __init__(self, world: int) -> None:
        self.comm = SimpleNamespace(rank=0, world=world, launched=0)
        self.error: Exception | None = None

    def check_offer(self, command: Body) -> None:
        pass

    def prepare(self, *args: Any) -> Change:
        return Change()

    def execute(self, *args: Any) -> None:
        self.comm.launched += 1
        if self.error is not None:
            raise self.error

    def release(self) -> None:
        pass


class Ranks:
    """The head's end, `broadcaster`, and the workers' links by rank."""

    def __init__(self, world: int) -> None:
        pairs = [socket.socketpair() for _ in range(1, world)]
        self.head = HeadLinks([Channel(near, f"rank {rank}") for rank, (near, _) in enumerate(pairs, 1)], 0, never_closed)
        self.workers = {rank: WorkerLink(Channel(far, "the head"), rank, 0, never_closed) for rank, (_, far) in enumerate(pairs, 1)}
        self.executor = Rank0(world)
        executor: Any = self.executor
        self.page = ProgressPage()
        self.broadcaster = Broadcaster(
            executor, self.head, SlotTable(LIMITS), epoch=0, version=2, deadline_s=LONG_S, page=self.page
        )

    def launch(self, command: Body = STEP) -> None:
        self.broadcaster.run(command, BATCH, later=True)

    def look_for(self, seconds: float) -> None:
        """Look so long, as one who waits for something else."""
        end = monotonic() + seconds
        while monotonic() < end:
            self.broadcaster.check()

    def answer(self, rank: int, status: AckStatus = AckStatus.OK, collectives: int = 1) -> int:
        """Take the rank's next frame and ack it; its step."""
        step = decode(self.workers[rank].receive(monotonic() + LONG_S)).preamble.step
        code = ErrorCode.NONE if status is AckStatus.OK else ErrorCode.VALUE
        self.workers[rank].ack(Ack(rank, 0, step, status, code, collectives, message="" if code is ErrorCode.NONE else "broken"))
        return step


@contextmanager
def ranks_of(world: int) -> Iterator[Ranks]:
    ranks = Ranks(world)
    try:
        yield ranks
    finally:
        ranks.head.close()
        for worker in ranks.workers.values():
            worker.close()


def test_a_launched_step_waits_for_nobody_and_the_next_command_for_its_acks() -> None:
    with ranks_of(3) as ranks:
        ranks.launch()
        ranks.broadcaster.check()
        assert ranks.broadcaster.last_steps == [0, 0, 0]
        assert [ranks.answer(rank) for rank in (2, 1)] == [0, 0]
        ranks.launch()
        assert [ranks.answer(rank) for rank in (1, 2)] == [1, 1]
        ranks.broadcaster.settle()
        assert ranks.broadcaster.last_steps == [1, 1, 1]
        ranks.broadcaster.settle()


def test_no_command_goes_out_before_the_last_ones_outcomes_are_judged() -> None:
    with ranks_of(2) as ranks:
        ranks.launch()
        ranks.answer(1, AckStatus.FAILED)
        with pytest.raises(EpRankFailed, match=r"only some ranks failed step 0.*broken.*step 0, DECODE"):
            ranks.broadcaster.run(Ping(), BATCH)
        assert ranks.broadcaster.step == 1
        ranks.head.close()
        with pytest.raises(EpPeerGone):
            ranks.workers[1].receive(monotonic() + LONG_S)


DIFFERENT = [(AckStatus.FAILED, 1, EpRankFailed), (AckStatus.OK, 2, EpDiverged)]


@pytest.mark.parametrize(("status", "collectives", "error"), DIFFERENT, ids=["failed", "differs"])
def test_a_look_between_commands_finds_an_outcome_that_differs(status: AckStatus, collectives: int, error: type[Exception]) -> None:
    with ranks_of(3) as ranks:
        ranks.launch()
        ranks.answer(1)
        ranks.broadcaster.check()
        ranks.answer(2, status, collectives)
        with pytest.raises(error, match="step 0"):
            ranks.broadcaster.check()


@pytest.mark.parametrize("world", [1, 2])
def test_a_look_leaves_the_page_with_what_is_waited_for(world: int) -> None:
    """The head waits for its device, whose step every rank has acked: nobody is to look for a rank that has not."""
    with ranks_of(world) as ranks:
        ranks.launch()
        ranks.page.enter(Phase.READING)
        for rank in ranks.workers:
            ranks.answer(rank)
        ranks.broadcaster.check()
        assert ranks.broadcaster.last_steps == [0] * world
        assert ranks.page.read().phase is Phase.READING


def test_the_page_says_when_acks_are_waited_for() -> None:
    with ranks_of(2) as ranks:
        ranks.launch()
        assert ranks.page.read().phase is Phase.EXECUTING
        ranks.answer(1)
        ranks.broadcaster.settle()
        assert ranks.page.read().phase is Phase.ACKNOWLEDGING


def test_a_rank_that_does_not_answer_in_time_is_found_by_who_waits_for_something_else() -> None:
    """For a device, say, whose step waits for that rank."""
    with ranks_of(3) as ranks:
        ranks.broadcaster.run(STEP, BATCH, later=True, deadline_s=0.05)
        ranks.answer(1)
        with pytest.raises(EpDeadline, match=r"acks of epoch 0 step 0 from ranks 2 .*step 0, DECODE"):
            ranks.look_for(LONG_S)


def test_who_is_slow_to_look_finds_an_answer_that_came_in_time() -> None:
    with ranks_of(2) as ranks:
        ranks.broadcaster.run(STEP, BATCH, later=True, deadline_s=0.0)
        ranks.answer(1)
        ranks.broadcaster.check()
        ranks.broadcaster.settle()


def test_a_rank_that_leaves_after_it_was_sent_to_is_found() -> None:
    with ranks_of(2) as ranks:
        ranks.launch()
        ranks.workers[1].close()
        with pytest.raises(EpPeerGone, match=r"rank 1 is gone.*step 0, DECODE"):
            ranks.broadcaster.settle()


def test_a_look_that_finds_a_rank_gone_says_why_it_went() -> None:
    with ranks_of(2) as ranks:
        ranks.launch()
        ranks.answer(1, AckStatus.FAILED)
        ranks.workers[1].close()
        with pytest.raises(EpPeerGone, match=r"rank 1 is gone.*after it acked FAILED broken"):
            ranks.broadcaster.check()


def test_a_failure_of_this_rank_is_judged_at_once() -> None:
    with ranks_of(2) as ranks:
        ranks.executor.error = ValueError("broken")
        ranks.workers[1].ack(Ack(1, 0, 0, AckStatus.FAILED, ErrorCode.VALUE, 1, message="broken"))
        with pytest.raises(EpCommandFailed, match="broken"):
            ranks.launch()
        ranks.executor.error = None
        ranks.launch(Ping())
        assert [ranks.answer(1) for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("lookahead", [False, True])
def test_results_are_read_when_the_outcomes_of_their_step_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lookahead: bool
) -> None:
    """Of the step itself, or of one that was sent behind it."""
    read, steps = PendingStep.read, []
    model = make_checkpoint("mixtral", "plain", tmp_path / "model")
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with head_of(CONTEXT, str(model), lookahead=lookahead, digest_interval=0, **sizes) as driver:
        assert driver is not None
        numbers: dict[int, int] = {}

        def noting(pending: PendingStep, plan: Any, *rest: Any, **named: Any) -> None:
            made(pending, plan, *rest, **named)
            numbers[id(plan)] = driver.broadcaster.step - 1

        def reading(pending: PendingStep) -> Any:
            steps.append(driver.broadcaster.last_steps[0] >= numbers[id(pending.plan)])
            return read(pending)

        made = PendingStep.__init__
        monkeypatch.setattr(PendingStep, "__init__", noting)
        monkeypatch.setattr(PendingStep, "read", reading)
        for name in ("0", "1"):
            driver.submit(name, [5, 6, 7], max_tokens=6)
        driver.finish()
    assert len(steps) >= 6
    assert all(steps)
