"""The worker's loop: receive one command, run it, answer."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING

import torch

from ep_runtime.engine.run_command import located, run_command
from protocol.ack import Ack, AckStatus, ErrorCode, error_code
from protocol.commands import Forward, Shutdown
from protocol.errors import EpCommandFailed, EpLinkLost, EpPeerGone, EpRankFailed
from protocol.frame import decode, expect
from protocol.progress import Phase, ProgressPage

if TYPE_CHECKING:
    from ep_runtime.engine.executor import Executor
    from model.batch import ForwardOutput
    from protocol.links import WorkerLink
    from protocol.slots import SlotTable

log = logging.getLogger(__name__)

TIMED_FORWARDS = 1024
"""As many of the last forwards does a worker know the host time of."""


class Worker:
    """One rank's end of an epoch. It takes no decision: what it does follows from the frames.

    `forward_seconds` are those from a forward's frame received to its ack sent, of the last ones: on a GPU the device's work is not
    in them.
    """

    def __init__(
        self, executor: Executor, link: WorkerLink, *, version: int, device: torch.device, page: ProgressPage | None = None
    ) -> None:
        self.step = 0
        self._executor = executor
        self._link = link
        self._version = version
        self._device = device
        self._page = ProgressPage() if page is None else page
        self.forward_seconds: deque[float] = deque(maxlen=TIMED_FORWARDS)

    def ep_worker_step(self, slots: SlotTable) -> bool:
        """Receive one command, run it, acknowledge it. False on SHUTDOWN.

        Raises:
            EpCommandFailed: the command ran and failed; it is acknowledged, and the next one may follow.
            EpLinkLost: everything else; the epoch is over for this rank. It names rank, step, command and phase.
        """
        try:
            return self._step(slots)
        except EpLinkLost as lost:
            raise located(lost, self._link.rank, self._page) from lost

    def _step(self, slots: SlotTable) -> bool:
        self._page.enter(Phase.WAITING)
        data = self._link.receive()
        received = time.monotonic()
        frame = decode(data, version=self._version)
        expect(frame, epoch=self._link.epoch, step=self.step)
        step, self.step = self.step, self.step + 1
        if isinstance(frame.command, Shutdown):
            self._link.ack(Ack(self._link.rank, self._link.epoch, step, AckStatus.OK))
            return False
        ack, error = run_command(self._executor, frame, slots, self._await_tokens, self._vote, self._page)
        if ack.status in (AckStatus.OK, AckStatus.FAILED):
            self._link.ack(ack)
        if isinstance(frame.command, Forward):
            self.forward_seconds.append(time.monotonic() - received)
        if error is not None or ack.status not in (AckStatus.OK, AckStatus.FAILED):
            raise scoped(error, step)
        return True

    def run(self, slots: SlotTable) -> None:
        """Serve commands until SHUTDOWN."""
        while True:
            try:
                if not self.ep_worker_step(slots):
                    self._log_host_time()
                    return
            except EpCommandFailed as error:
                log.warning("rank %d: %s", self._link.rank, error)

    def _log_host_time(self) -> None:
        if self.forward_seconds:
            median, count = 1e3 * statistics.median(self.forward_seconds), len(self.forward_seconds)
            log.info("rank %d: host time of a forward, median of the last %d: %.3f ms", self._link.rank, count, median)

    def _vote(self, ballot: Ack) -> bool:
        self._link.ack(ballot)
        return self._link.verdict(ballot.step)

    def _await_tokens(self, output: ForwardOutput, command: Forward) -> torch.Tensor:
        """Room for the tokens that the head's broadcast brings."""
        return torch.empty(sum(span.sampled for span in command.spans), dtype=torch.int64, device=self._device)


def scoped(error: Exception | None, step: int) -> EpCommandFailed | EpLinkLost:
    """The error of a failed step, by scope: what may have happened alike on every rank, or what ends the epoch for this one."""
    if isinstance(error, EpCommandFailed | EpLinkLost):
        return error
    if error is None:
        return EpCommandFailed(f"step {step} was voted down by another rank")
    kinds: dict[ErrorCode, type[EpCommandFailed | EpLinkLost]] = {ErrorCode.DEVICE: EpRankFailed, ErrorCode.LINK: EpPeerGone}
    scoped_error = kinds.get(error_code(error), EpCommandFailed)(f"step {step}: {type(error).__name__}: {error}")
    scoped_error.__cause__ = error
    return scoped_error
