"""Whether the ranks are there and agree: pings while nothing is launched, comparisons, and the head's own books at rest."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from ep_runtime.scheduler.core import SchedulerError
from protocol.commands import BATCH, Digest, Ping
from protocol.errors import EpCommandFailed, EpDiverged, EpLinkLost
from protocol.progress import Phase, ProgressPage

if TYPE_CHECKING:
    from ep_runtime.engine.broadcast import Broadcaster
    from ep_runtime.engine.launcher import Launcher
    from ep_runtime.engine.requests import RequestTable
    from ep_runtime.engine.sampler import Sampler
    from ep_runtime.engine.vision.turns import ImageTurns
    from ep_runtime.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

PING_INTERVAL_S = 1.0

REPORT_DEADLINE_S = 1.0
"""For the ranks to log their slot tables once they have diverged."""


class Upkeep:
    """Owns the time since the last command and whether anything has run since the last comparison at rest."""

    def __init__(
        self,
        broadcaster: Broadcaster,
        scheduler: Scheduler,
        sampler: Sampler,
        requests: RequestTable,
        images: ImageTurns,
        launcher: Launcher,
        page: ProgressPage,
    ) -> None:
        self._broadcaster = broadcaster
        self._scheduler = scheduler
        self._sampler = sampler
        self._requests = requests
        self._images = images
        self._launcher = launcher
        self._page = page
        self._last_command = time.monotonic()
        self._checked = True

    def put_off(self) -> None:
        """A step is being launched: the next ping can wait, and after it there is something to compare."""
        self._last_command = time.monotonic()
        self._checked = False

    def rest(self, idle: bool) -> None:
        """Nothing can be launched and nothing is under way: keep in touch with the ranks, and compare them once after work.

        `idle`: no request waits or is alive either.
        """
        self._page.enter(Phase.WAITING)
        if time.monotonic() - self._last_command < PING_INTERVAL_S:
            return
        self._last_command = time.monotonic()
        if self._checked or not idle:
            self._broadcaster.run(Ping(), BATCH)
            return
        self._checked = True
        self.compare()
        self.check_books()

    def compare(self) -> None:
        """Have every rank say what it holds; EpDiverged, naming the sections and the ranks, when they differ."""
        try:
            self._broadcaster.run(Digest(), BATCH)
        except EpCommandFailed as error:
            raise EpDiverged(f"no rank can say what it holds: {error}") from error

    def check_books(self) -> None:
        """EpDiverged when something is left, or does not add up, in what the head keeps while no request lives."""
        try:
            self._scheduler.check_integrity()
            self._sampler.check_integrity()
            self._images.check_integrity()
            self._requests.check_integrity(self._scheduler.live())
        except (SchedulerError, AssertionError, ValueError) as error:
            raise EpDiverged(f"the head's books do not add up when idle: {error}") from error
        held = {state.slot for state in self._broadcaster.slots if state is not None}
        sampling = self._launcher.sampling_slots
        if held or sampling:
            raise EpDiverged(f"no request lives, but slots {sorted(held)} are held, and {sorted(sampling)} sample")

    def report_tables(self) -> None:
        """Have every rank that still answers log its slot table. The epoch is over, whatever comes of it."""
        try:
            self._broadcaster.run(Digest(report=True), BATCH, deadline_s=REPORT_DEADLINE_S)
        except (EpCommandFailed, EpLinkLost) as error:
            log.warning("after the divergence: %s", error)
