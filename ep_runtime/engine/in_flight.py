"""The steps that are launched and not read yet, and the waits for what the device does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from protocol.progress import Phase, ProgressPage

if TYPE_CHECKING:
    from ep_runtime.engine.broadcast import Broadcaster
    from ep_runtime.engine.busy import BusyTime
    from ep_runtime.engine.outbox import Outbox
    from ep_runtime.engine.pending import PendingStep
    from ep_runtime.scheduler.scheduler import Scheduler

POLL_S = 20e-6
"""Between looks at a device event: short against a step, long enough to leave the core to others."""


class StepsInFlight:
    """Reads each step's results in the order of launching, for the scheduler, and hands on what that makes of them."""

    def __init__(
        self,
        broadcaster: Broadcaster,
        scheduler: Scheduler,
        outbox: Outbox,
        page: ProgressPage,
        busy: BusyTime,
        check_epoch: Callable[[], None],
    ) -> None:
        self._steps: deque[PendingStep] = deque()
        self._broadcaster = broadcaster
        self._scheduler = scheduler
        self._outbox = outbox
        self._page = page
        self._busy = busy
        self._check_epoch = check_epoch

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: PendingStep) -> None:
        """One more, launched behind all others."""
        self._steps.append(step)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when a step's results are on the host, or a slice is done, and of an epoch that is still open.

        An epoch is closed before its collectives are aborted: what was computed since may be garbage, and is not looked at.
        """
        if not ready():
            self._page.enter(Phase.READING)
            began = time.monotonic()
            while not ready():
                self._check_epoch()
                time.sleep(POLL_S)
            self._busy.waited(began)
        self._check_epoch()

    def wait_first(self) -> None:
        """Return when the oldest step's results, if there is one, can be read."""
        if self._steps:
            self.wait(self._steps[0].ready)

    def read(self) -> None:
        """Wait for the oldest step's results and read them."""
        pending = self._steps[0]
        self.wait(pending.ready)
        if len(self._steps) == 1:
            self._broadcaster.settle()  # of earlier steps it was done before the next one was sent
        self._steps.popleft()
        result, failures = pending.read()
        for request_id, message in failures:
            self._scheduler.reject([request_id], message)
        self._outbox.publish(self._scheduler.complete(result))

    def read_ready(self) -> None:
        """Read what can be read without waiting."""
        while self._steps and self._steps[0].ready():
            self.read()

    def read_all(self) -> None:
        """Read everything that is under way."""
        while self._steps:
            self.read()
