"""Sending one command to every rank, running it here too, and judging all outcomes together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ep_runtime.engine.run_command import located, run_command
from protocol.commands import Body, Forward, Shutdown
from protocol.errors import EpError, EpLinkLost
from protocol.frame import compose
from protocol.progress import Phase, ProgressPage
from protocol.verdict import Ok, judge, judge_votes, raise_outcome

if TYPE_CHECKING:
    from ep_runtime.engine.executor import Choose, Executor
    from model.batch import ForwardOutput
    from protocol.ack import Ack
    from protocol.frame import Frame
    from protocol.links import HeadLinks
    from protocol.slots import SlotTable


class Broadcaster:
    """The head's end of an epoch: numbers the commands and holds the ranks to them."""

    def __init__(
        self,
        executor: Executor,
        links: HeadLinks,
        slots: SlotTable,
        *,
        epoch: int,
        version: int,
        deadline_s: float,
        page: ProgressPage | None = None,
    ) -> None:
        self.step = 0
        self.slots = slots
        self.last_steps = [0] * executor.comm.world
        self._unjudged: tuple[Ack, float] | None = None
        self._executor = executor
        self._links = links
        self._epoch = epoch
        self._version = version
        self._deadline_s = deadline_s
        self._page = ProgressPage() if page is None else page

    def run(
        self,
        command: Body,
        seq_id: int,
        *,
        tokens: Sequence[int] = (),
        choose: Choose | None = None,
        flags: int = 0,
        deadline_s: float | None = None,
        later: bool = False,
    ) -> None:
        """Run one command on all ranks; returns when each has launched it. `deadline_s` is for commands with their own.

        With `later` it returns as soon as this rank has launched it, if it has: the other ranks' outcomes are left to `settle`.
        The rows of a VISION have been offered to the executor before; whatever happens, none are on offer afterwards.

        Raises:
            EpCommandFailed: it failed alike on every rank, was voted down before anything changed, or could not be sent at all.
            EpLinkLost: the epoch is over. It names rank, step, command and phase; its cause is what was raised here, if anything.
        """
        try:
            self.settle()
            deadline_s = self._deadline_s if deadline_s is None else deadline_s
            self._run(command, seq_id, tokens, choose or _never, flags, deadline_s, later)
        finally:
            self._executor.release()

    def settle(self) -> None:
        """Judge the last command's outcomes, waiting for the other ranks', if `run` has left that: before its results are used.

        This rank has launched it, so it cannot have failed alike on every rank. Raises EpLinkLost as `run`.
        """
        if self._unjudged is None:
            return
        (own, deadline), self._unjudged = self._unjudged, None
        if not self._links.answered:  # otherwise it waits for nobody, and whoever looks goes on with what the page says
            self._page.enter(Phase.ACKNOWLEDGING)
        try:
            self._judge(own, None, deadline)
        except EpLinkLost as lost:
            raise located(lost, 0, self._page) from (lost.__cause__ or lost)

    def _run(
        self, command: Body, seq_id: int, tokens: Sequence[int], choose: Choose, flags: int, deadline_s: float, later: bool
    ) -> None:
        self._executor.check_offer(command)
        array = np.asarray(tokens, dtype=np.int32)
        data, frame = compose(command, seq_id, array, epoch=self._epoch, step=self.step, version=self._version, flags=flags)
        step, self.step = self.step, self.step + 1
        self._page.begin_command(step, command.cmd)
        deadline = time.monotonic() + deadline_s
        try:
            self._links.send(data, deadline)
            if isinstance(command, Shutdown):
                self._page.enter(Phase.ACKNOWLEDGING)
                self._links.collect(step, deadline, leaving=True)
            else:
                self._run_everywhere(frame, choose, deadline, later)
        except EpLinkLost as lost:
            raise located(lost, 0, self._page) from (lost.__cause__ or lost)

    def _run_everywhere(self, frame: Frame, choose: Choose, deadline: float, later: bool) -> None:
        """Run what has been sent on this rank, too, and judge the outcomes of all, or leave that for `later`."""
        step = frame.preamble.step
        own, error = run_command(
            self._executor, frame, self.slots, choose, lambda ballot: self._count_votes(ballot, step, deadline), self._page
        )
        if later and error is None:
            self._unjudged = own, deadline
        else:
            self._page.enter(Phase.ACKNOWLEDGING)
            self._judge(own, error, deadline)

    def _judge(self, own: Ack, error: Exception | None, deadline: float) -> None:
        failed_at = time.monotonic() if own.failed else None
        try:
            acks = [own, *self._links.collect(own.step, deadline, failed_at=failed_at)]
            self.last_steps = [ack.step for ack in acks]
            raise_outcome(judge(acks))
        except EpError as outcome:
            raise outcome from error

    def check(self) -> None:
        """Without waiting: raise `EpLinkLost` if a worker is gone, the epoch is over, or the last command's outcomes say so.

        For waits between commands. A rank whose outcome has not come by the command's deadline may be why this one waits.
        """
        self._links.check()
        if self._unjudged is not None and (self._links.answered or time.monotonic() > self._unjudged[1]):
            self.settle()

    def _count_votes(self, ballot: Ack, step: int, deadline: float) -> bool:
        outcome = judge_votes([ballot, *self._links.collect(step, deadline, vote=True)])
        self._links.send_verdict(step, isinstance(outcome, Ok), deadline)
        raise_outcome(outcome)
        return True


def _never(output: ForwardOutput, command: Forward) -> torch.Tensor:
    raise AssertionError("a forward that samples was launched without a sampler")
