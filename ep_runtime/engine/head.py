"""The head's loop: plan a step, broadcast it, run it, read the results of the step before.

Step n+1 is planned and launched while step n is on the device; results are read when they are ready, and awaited only when two
steps are under way. On a CPU a launched step is a finished one, so its results are read before the next plan is made. A suspect's
step is alone on the device, and the progress page names it meanwhile. Images are encoded between steps.

What a turn does is done by its parts, each of which knows only those above it:

```
Outbox         results to the frontend
Inbox          requests, aborts and masks from it
StepsInFlight  launched steps, read in order
ImageTurns     slices of the encoder between steps
Launcher       a plan's commands
Upkeep         pings, comparisons of the ranks, the head's books at rest
```
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ep_runtime.engine.busy import BusyTime
from ep_runtime.engine.in_flight import StepsInFlight
from ep_runtime.engine.inbox import Inbox
from ep_runtime.engine.intake import Intake
from ep_runtime.engine.launcher import Launcher
from ep_runtime.engine.outbox import Outbox
from ep_runtime.engine.requests import RequestTable
from ep_runtime.engine.upkeep import Upkeep
from ep_runtime.engine.vision.turns import ImageTurns
from protocol.commands import BATCH, Shutdown, Warm
from protocol.errors import EpDiverged
from protocol.progress import ProgressPage

if TYPE_CHECKING:
    from ep_runtime.engine.broadcast import Broadcaster
    from ep_runtime.engine.port import Port
    from ep_runtime.engine.sampler import Sampler
    from ep_runtime.engine.vision.encoder import ImageEncoder
    from ep_runtime.scheduler.scheduler import Scheduler

LOOKAHEAD = 2
"""Steps under way at most: one on the device, one launched behind it."""

IDLE_WAIT_S = 0.2

MASK_GATHER_S = 0.001
"""How long the next mask is waited for after one came, when all requests have grammars: rows that drift apart take many steps."""


class Head:
    """Owns the scheduler and drives every rank, its own included, by commands alone."""

    def __init__(
        self,
        *,
        broadcaster: Broadcaster,
        scheduler: Scheduler,
        sampler: Sampler,
        port: Port,
        epoch: int,
        digest_interval: int = 0,
        read_when_ready: bool = True,
        mask_deadline_s: float = 30.0,
        page: ProgressPage | None = None,
        check_epoch: Callable[[], None] = lambda: None,
        announce: Callable[[], None] = lambda: None,
        encoder: ImageEncoder | None = None,
    ) -> None:
        page = page if page is not None else ProgressPage()
        self.epoch = epoch
        self.requests = requests = RequestTable()
        self._broadcaster = broadcaster
        self._scheduler = scheduler
        self._port = port
        self._read_when_ready = read_when_ready
        self._check_epoch = check_epoch
        self._intake = intake = Intake()
        self._busy = busy = BusyTime()
        self._resting = False
        self._outbox = outbox = Outbox(port, scheduler, broadcaster, requests, intake, busy, epoch=epoch, announce=announce)
        self._inbox = Inbox(
            port,
            scheduler,
            requests,
            intake,
            outbox,
            busy,
            vocab_size=sampler.vocab_size,
            vision=None if encoder is None else encoder.spec,
            mask_deadline_s=mask_deadline_s,
        )
        self._in_flight = in_flight = StepsInFlight(broadcaster, scheduler, outbox, page, busy, check_epoch)
        self._images = images = ImageTurns(encoder, broadcaster, scheduler, requests, in_flight, outbox, page)
        self._launcher = launcher = Launcher(
            broadcaster, scheduler, sampler, requests, in_flight, images, outbox, page, digest_interval=digest_interval
        )
        self._upkeep = Upkeep(broadcaster, scheduler, sampler, requests, images, launcher, page)

    def warm(self, buckets: list[int], deadline_s: float) -> None:
        """Have every rank connect, compile and capture before the first request, within `deadline_s` seconds."""
        self._broadcaster.run(Warm(buckets=buckets), BATCH, deadline_s=deadline_s)

    def run(self, stopping: Callable[[], bool], grace_left: Callable[[], float]) -> None:
        """Serve until `stopping()`; finish what runs while `grace_left()` seconds last; then `shutdown`."""
        while not stopping():
            self.turn()
        while not self.idle and (grace := grace_left()) > 0:
            self._check_epoch()
            self.turn(idle_wait_s=min(grace, IDLE_WAIT_S))
        self.shutdown()

    @property
    def idle(self) -> bool:
        """True when no request waits or is alive and no result is unread."""
        return self._scheduler.idle and not self._in_flight and not self._intake

    @property
    def host_seconds(self) -> float:
        """Seconds of this loop so far outside its waits: for the device's results, and for something to do."""
        return self._busy.seconds

    def turn(self, idle_wait_s: float = IDLE_WAIT_S) -> None:
        """Receive, read what is ready, launch at most one step; waits only when there is nothing to launch.

        Of the requests that have come, a turn takes in a bounded number; while none is alive, no more than fill its step.
        """
        try:
            self._turn(idle_wait_s)
        except EpDiverged:
            self._upkeep.report_tables()
            raise

    def _turn(self, idle_wait_s: float) -> None:
        self._outbox.announce()
        self._inbox.receive(idle_wait_s if self._resting and not self._intake else 0.0)
        while not (self._in_flight or self._intake) and self.requests.more_masks_coming(time.monotonic() - MASK_GATHER_S):
            self._inbox.receive(MASK_GATHER_S)
        self._inbox.reject_late_masks()
        if self._read_when_ready:
            self._in_flight.read_ready()
        self._inbox.take_in(None if self.requests else self._scheduler.limits.max_batch_tokens)
        may_launch = self._may_launch()
        encoding = may_launch and self._images.begin()
        plan = self._images.plan() if may_launch else None
        if encoding:
            self._images.launch_before(plan)
        self._resting = plan is None and not self._in_flight and not encoding
        if plan is not None:
            self._upkeep.put_off()
            if self._launcher.launch(plan):
                self._upkeep.compare()
        elif self._in_flight:
            self._in_flight.read()
        else:
            self._upkeep.rest(self.idle)
            if encoding:
                self._images.wait_ready()

    def _may_launch(self) -> bool:
        """Whether another step may be planned: one that is under way less, and results that somebody takes."""
        if len(self._in_flight) >= LOOKAHEAD:
            return False
        return self._inbox.closed or not self._port.congested

    def shutdown(self) -> None:
        """End what is left as aborted, free every slot, and let the workers leave. New requests are refused from here on."""
        self._inbox.closed = True
        self._scheduler.abort(self.requests.ids())
        while not self.idle:
            self.turn(idle_wait_s=0.0)
        self._images.drop()
        self._outbox.drain()
        self._broadcaster.run(Shutdown(), BATCH)
