"""Running one command on this rank and putting its outcome into an ack: the same function on the head and on every worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ep_runtime.engine.digest import StateDigest
from ep_runtime.engine.out_of_memory import let_go
from protocol.ack import Ack, AckStatus, failure
from protocol.commands import Digest
from protocol.errors import EpLinkLost
from protocol.progress import Phase, ProgressPage
from protocol.slots import Change, poison, undo

if TYPE_CHECKING:
    from ep_runtime.engine.executor import Choose, Executor
    from protocol.frame import Frame
    from protocol.slots import SlotTable

log = logging.getLogger(__name__)

Vote = Callable[[Ack], bool]
"""Gives this rank's vote to the head and returns the verdict of all."""


def run_command(
    executor: Executor, frame: Frame, slots: SlotTable, choose: Choose, vote: Vote, page: ProgressPage
) -> tuple[Ack, Exception | None]:
    """Prepare, vote where the command asks for it, execute; `page` follows. What was reserved and not taken is let go.

    Returns:
        the ack to send, and what was raised here, if anything. A command that was voted down gives its VOTE ack and the reason.

    Raises:
        EpLinkLost: a wait in `execute` or in the vote found that the epoch is over; there is nobody to answer.
    """
    try:
        return _run(executor, frame, slots, choose, vote, page)
    finally:
        executor.release()


def _run(
    executor: Executor, frame: Frame, slots: SlotTable, choose: Choose, vote: Vote, page: ProgressPage
) -> tuple[Ack, Exception | None]:
    rank, epoch, step = executor.comm.rank, frame.preamble.epoch, frame.preamble.step
    page.begin_command(step, frame.preamble.cmd)
    refused: Exception | None = None
    change = None
    try:
        change = executor.prepare(frame, slots)
    except Exception as error:
        refused = error
    if frame.command.voted:
        page.enter(Phase.VOTING)
        ballot = (
            Ack(rank, epoch, step, AckStatus.VOTE_YES)
            if refused is None
            else failure(refused, rank=rank, epoch=epoch, step=step, phase="preparing", status=AckStatus.VOTE_NO)
        )
        if not vote(ballot):
            return ballot, refused
    if refused is not None or change is None:
        assert refused is not None
        return failure(refused, rank=rank, epoch=epoch, step=step, phase="preparing"), refused
    page.enter(Phase.EXECUTING)
    return _execute(executor, frame, change, slots, choose)


def _execute(executor: Executor, frame: Frame, change: Change, slots: SlotTable, choose: Choose) -> tuple[Ack, Exception | None]:
    rank, epoch, step = executor.comm.rank, frame.preamble.epoch, frame.preamble.step
    launched = executor.comm.launched
    digest = StateDigest(0, "")
    try:
        executor.execute(frame, change, slots, choose)
        if isinstance(frame.command, Digest):
            digest = executor.digest(slots)
    except EpLinkLost:
        raise
    except Exception as error:
        log.exception("step %d failed on rank %d", step, rank)
        let_go(error)
        undo(change, slots)
        poison(frame.command, slots)
        collectives = executor.comm.launched - launched
        return failure(error, rank=rank, epoch=epoch, step=step, phase="executing", collectives=collectives), error
    collectives = executor.comm.launched - launched
    return Ack(rank, epoch, step, AckStatus.OK, collectives=collectives, digest=digest.value, message=digest.text), None


def located(lost: EpLinkLost, rank: int, page: ProgressPage) -> EpLinkLost:
    """The same finding, saying which rank made it and in which step, command and phase, as its page has them."""
    at = page.read()
    command = f"{at.command_name} " if at.command else ""
    return type(lost)(f"{lost} [rank {rank}: step {at.step}, {command}{at.phase.name.lower()}, {at.collectives} collectives]")
