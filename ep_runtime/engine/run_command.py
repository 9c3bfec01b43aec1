"""Running one command on this rank and putting its outcome into an ack: the same function on the head and on every worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from protocol.ack import Ack, AckStatus, failure
from protocol.commands import Digest
from protocol.slots import poison, undo

if TYPE_CHECKING:
    from ep_runtime.engine.executor import Choose, Executor
    from protocol.frame import Frame
    from protocol.slots import SlotTable

log = logging.getLogger(__name__)

Vote = Callable[[Ack], bool]
"""Gives this rank's vote to the head and returns the verdict of all."""


def run_command(executor: Executor, frame: Frame, slots: SlotTable, choose: Choose, vote: Vote) -> tuple[Ack, Exception | None]:
    """Prepare, vote where the command asks for it, execute.

    Returns:
        the ack to send, and what was raised here, if anything. A command that was voted down gives its VOTE ack and the reason.
    """
    rank, epoch, step = executor.comm.rank, frame.preamble.epoch, frame.preamble.step
    launched = executor.comm.launched
    refused: Exception | None = None
    change = None
    try:
        change = executor.prepare(frame, slots)
    except Exception as error:
        refused = error
    if frame.command.voted:
        ballot = (
            Ack(rank, epoch, step, AckStatus.VOTE_YES)
            if refused is None
            else failure(refused, rank=rank, epoch=epoch, step=step, status=AckStatus.VOTE_NO)
        )
        if not vote(ballot):
            return ballot, refused
    if refused is not None or change is None:
        assert refused is not None
        return failure(refused, rank=rank, epoch=epoch, step=step), refused
    try:
        executor.execute(frame, change, slots, choose)
        digest = executor.digest(slots) if isinstance(frame.command, Digest) else 0
    except Exception as error:
        log.exception("step %d failed on rank %d", step, rank)
        undo(change, slots)
        poison(frame.command, slots)
        return failure(error, rank=rank, epoch=epoch, step=step, collectives=executor.comm.launched - launched), error
    return Ack(rank, epoch, step, AckStatus.OK, collectives=executor.comm.launched - launched, digest=digest), None
