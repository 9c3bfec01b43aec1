"""The head's loop: plan a step, broadcast it, run it, read the results of the step before.

Step n+1 is planned and launched while step n is on the device; results are read when they are ready, and awaited only when two
steps are under way. On a CPU a launched step is a finished one, so its results are read before the next plan is made. A suspect's
step is alone on the device, and the progress page names it meanwhile. Images are encoded between steps, a slice for each, and never
beside pieces of prompts: while both are due they take turns.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ep_runtime.engine.broadcast import Broadcaster
from ep_runtime.engine.busy import BusyTime
from ep_runtime.engine.intake import Intake
from ep_runtime.engine.pending import PendingStep
from ep_runtime.engine.port import FrontendLost, Received, Undecodable
from ep_runtime.engine.requests import RequestTable
from ep_runtime.engine.sampling.checks import mask_fault, submission_fault
from ep_runtime.engine.step_sampling import StepSampling
from ep_runtime.engine.vision.checks import images_fault
from ep_runtime.engine.vision.encoder import WantedImage
from ep_runtime.scheduler.core import Plan, SchedulerError, SlotAlloc
from ep_runtime.scheduler.results import refused
from protocol.commands import BATCH, Alloc, Digest, Free, Ping, Shutdown, Vision, VisionGrid, Warm, forward_command
from protocol.errors import EpCommandFailed, EpDiverged, EpLinkLost
from protocol.messages import Abort, EngineStats, Mask, Results, SequenceUpdate, Submit, Takeover
from protocol.preamble import RECORD_ROUTING
from protocol.progress import Phase, ProgressPage

if TYPE_CHECKING:
    from ep_runtime.engine.port import Port
    from ep_runtime.engine.sampler import Sampler
    from ep_runtime.engine.vision.encoder import ImageEncoder
    from ep_runtime.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

LOOKAHEAD = 2
"""Steps under way at most: one on the device, one launched behind it."""

IDLE_WAIT_S = 0.2
POLL_S = 20e-6
"""Between looks at a device event: short against a step, long enough to leave the core to others."""

PING_INTERVAL_S = 1.0
SIGN_OF_LIFE_S = 1.0

MASK_GATHER_S = 0.001
"""How long the next mask is waited for after one came, when all requests have grammars: rows that drift apart take many steps."""

REPORT_DEADLINE_S = 1.0
"""For the ranks to log their slot tables once they have diverged."""


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
        self.epoch = epoch
        self.requests = RequestTable()
        self._broadcaster = broadcaster
        self._scheduler = scheduler
        self._sampler = sampler
        self._port = port
        self._digest_interval = digest_interval
        self._read_when_ready = read_when_ready
        self._intake = Intake()
        self._in_flight: deque[PendingStep] = deque()
        self._mask_deadline_s = mask_deadline_s
        self._page = page if page is not None else ProgressPage()
        self._check_epoch = check_epoch
        self._announce = announce
        self._encoder = encoder
        self._busy = BusyTime()
        self._slice_next = False
        self._last_announce = -SIGN_OF_LIFE_S
        self._last_command = time.monotonic()
        self._last_publish = 0.0
        self._forwards = 0
        self._sampling_slots: set[int] = set()
        self._resting = False
        self._checked = True
        self._leaving = False
        self._owner = ""

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
            self._report_tables()
            raise

    def _turn(self, idle_wait_s: float) -> None:
        now = time.monotonic()
        if now - self._last_announce >= SIGN_OF_LIFE_S and not self._port.congested:
            # A frontend that started later learns of this epoch from the repetition.
            self._last_announce = now
            self._announce()
        self._receive(idle_wait_s if self._resting and not self._intake else 0.0)
        while not (self._in_flight or self._intake) and self.requests.more_masks_coming(time.monotonic() - MASK_GATHER_S):
            self._receive(MASK_GATHER_S)
        self._reject_late_masks()
        while self._in_flight and self._read_when_ready and self._in_flight[0].ready():
            self._read()
        for message in self._intake.take(None if self.requests else self._scheduler.limits.max_batch_tokens):
            self._submit(message)
        may_launch = self._may_launch()
        encoding = may_launch and self._images_due()
        plan = self._plan() if may_launch else None
        if encoding:
            self._encode(plan)
        self._resting = plan is None and not self._in_flight and not encoding
        if plan is not None:
            self._launch(plan)
        elif self._in_flight:
            self._read()
        else:
            self._rest()
            if encoding and self._encoder is not None:
                self._await(self._encoder.ready)

    def _plan(self) -> Plan | None:
        encoder = self._encoder
        if encoder is None:
            return self._scheduler.plan()
        return self._scheduler.plan(encoder.cache, prompts=not (self._slice_next and self._may_encode(encoder)))

    def shutdown(self) -> None:
        """End what is left as aborted, free every slot, and let the workers leave. New requests are refused from here on."""
        self._leaving = True
        self._scheduler.abort(self.requests.ids())
        while not self.idle:
            self.turn(idle_wait_s=0.0)
        if self._encoder is not None:
            self._encoder.drop()
        self._publish(self._scheduler.drain_updates())
        self._broadcaster.run(Shutdown(), BATCH)

    # Receiving

    def _receive(self, wait_s: float) -> None:
        began = time.monotonic()
        messages = self._port.receive(wait_s)
        if wait_s > 0:
            self._busy.waited(began)
        for message in messages:
            self._accept(message)
        self._publish(self._scheduler.drain_updates())

    def _accept(self, message: Received) -> None:
        for submit in self._intake.due_before(message):
            self._submit(submit)
        match message:
            case Submit():
                self._intake.add(message)
            case Abort():
                self._scheduler.abort(message.request_ids)
            case Mask():
                fault = mask_fault(message.mask)
                if fault is not None:
                    self._scheduler.reject([message.request_id], fault)
                elif self._scheduler.allow(message.request_id, message.index):
                    self.requests.set_mask(message, time.monotonic())
            case Undecodable():
                self._refuse(message)
            case FrontendLost():
                log.warning("the frontend is gone; its %d requests are aborted", len(self.requests.ids()))
                self._scheduler.abort(self.requests.ids())
            case Takeover():
                self._owner = message.prefix
                self._scheduler.abort([name for name in self.requests.ids() if not name.startswith(self._owner)])

    def _refuse(self, message: Undecodable) -> None:
        """Answer the request that a broken message names. A second submission does not end the first, and nothing revives."""
        if message.request_id not in self.requests:
            if message.kind != "Mask":
                self._publish([refused(message.request_id, message.fault, 400)])
        elif message.kind != "Submit":
            self._scheduler.reject([message.request_id], message.fault, 400)

    def _submit(self, message: Submit) -> None:
        """Take a request or answer it at once. An id names one request until its terminal event has gone out."""
        request_id = message.request_id
        if request_id in self.requests:
            self._publish(self._scheduler.drain_updates())
        if request_id in self.requests:
            # An answer to the second one would end the first.
            log.error("request id %r is alive; a second request by that name is refused", request_id)
            return
        answer = None
        if self._leaving:
            answer = refused(request_id, "the engine is ending", 503)
        elif not request_id.startswith(self._owner):
            # What a frontend had sent before it died may arrive behind its successor's first word.
            answer = refused(request_id, "its frontend is gone", 503)
        elif (fault := self._fault(message)) is not None:
            answer = refused(request_id, fault, 400)
        else:
            answer = self._scheduler.submit(message)
        if answer is None:
            self.requests.add(message)
        else:
            self._publish([answer])

    def _fault(self, message: Submit) -> str | None:
        vision = None if self._encoder is None else self._encoder.spec
        return submission_fault(message, self._sampler.vocab_size) or images_fault(message, vision)

    # Encoding

    def _images_due(self) -> bool:
        """Begin to encode the images that come next, unless a pass is under way. False when nothing is to be encoded.

        A suspect's slice is launched here: it is alone on the device, like a suspect's steps, and what is in flight is read before.
        """
        encoder = self._encoder
        if encoder is None:
            return False
        if encoder.busy and not any(request_id in self.requests for request_id in encoder.requests):
            encoder.drop()
        if not encoder.busy and self._scheduler.images_due:
            wanted = self._scheduler.next_images(encoder.cache.capacity_rows, encoder.cache)
            encoder.begin([WantedImage(w.request_id, self.requests[w.request_id].images[w.index], w.alone) for w in wanted])
        if not encoder.busy:
            return False
        if encoder.suspect:
            self._read_all()
            self._await(encoder.done)
            self._page.set_alone(encoder.suspect)
            self._advance(encoder)
            self._await(encoder.done)
            self._page.set_alone("")
        return True

    def _encode(self, plan: Plan | None) -> None:
        """Launch the next slice in front of this plan's step. Behind a step with pieces of prompts, a slice's turn comes first."""
        encoder = self._encoder
        if encoder is None or not self._may_encode(encoder):
            return
        self._slice_next = plan is not None and bool(plan.tokens)
        if not self._slice_next:
            self._advance(encoder)

    def _may_encode(self, encoder: ImageEncoder) -> bool:
        """Whether the next slice may go in front of a step."""
        return encoder.busy and not encoder.suspect and encoder.ready()

    def _advance(self, encoder: ImageEncoder) -> None:
        """One slice. A request whose image cannot be encoded gets the error."""
        self._page.enter(Phase.EXECUTING)
        for failure in encoder.advance():
            self._scheduler.reject([failure.request_id], failure.message, failure.status)
        self._publish(self._scheduler.drain_updates())

    # Launching

    def _may_launch(self) -> bool:
        """Whether another step may be planned: one that is under way less, and results that somebody takes."""
        if len(self._in_flight) >= LOOKAHEAD:
            return False
        return self._leaving or not self._port.congested

    def _launch(self, plan: Plan) -> None:
        self._last_command = time.monotonic()
        self._checked = False
        if plan.alone:
            self._read_all()
            if self._encoder is not None:
                self._await(self._encoder.done)
        for slot in plan.frees:
            self._broadcaster.run(Free(), slot)
            if slot in self._sampling_slots:
                self._sampling_slots.remove(slot)
                self._sampler.stop(slot)
        if plan.alone:
            self._page.set_alone(plan.owners[0])
        digest_due = False
        if self._allocate(plan):
            self._scheduler.launched(plan)
            if plan.spans:
                digest_due = self._forward(plan)
        if plan.alone:
            if self._in_flight:
                self._await(self._in_flight[0].ready)
            self._page.set_alone("")
            self._read_all()
        if digest_due:
            self._compare()

    def _allocate(self, plan: Plan) -> bool:
        """ALLOC every new slot, and show it its images.

        A request for which that is voted down gets the error, and the plan is made again without it.
        """
        allocated: list[int] = []
        for alloc in plan.allocs:
            command = Alloc(
                token_budget=alloc.token_budget,
                prompt_length=alloc.prompt_length,
                adapter=alloc.adapter,
                owner_rank=alloc.owner,
                prefix_length=alloc.prefix_length,
                prefix_blocks=list(alloc.prefix_blocks),
                loops=alloc.loops,
            )
            try:
                self._broadcaster.run(command, alloc.slot)
                allocated.append(alloc.slot)
                self._show(alloc)
            except EpCommandFailed as error:
                self._scheduler.discard(plan, allocated)
                self._scheduler.reject([alloc.request_id], str(error))
                return False
            request = self.requests[alloc.request_id]
            generated = self._scheduler.generated(alloc.request_id)
            self._sampler.start(alloc.slot, request.sampling, request.prompt, generated)
            self._sampling_slots.add(alloc.slot)
        return True

    def _show(self, alloc: SlotAlloc) -> None:
        """VISION of a new slot whose prompt has images: the rows of those outside its prefix are in the encoder's cache."""
        if not alloc.images or self._encoder is None:
            return
        needed = alloc.images[alloc.skipped :]
        grids = [VisionGrid(image.start, image.height, image.width) for image in self.requests[alloc.request_id].images]
        self._encoder.offer([image.digest for image in needed])
        command = Vision(grids=grids, rows=sum(image.rows for image in needed), skipped=alloc.skipped)
        self._broadcaster.run(command, alloc.slot)

    def _forward(self, plan: Plan) -> bool:
        """Launch the plan's rows. True when the ranks are to be compared after it."""
        command = forward_command(list(plan.spans))
        digest_due = self._digest_interval > 0 and self._forwards % self._digest_interval == self._digest_interval - 1
        self._forwards += 1
        flags = RECORD_ROUTING if digest_due else 0
        sampling = StepSampling(plan, self._sampler, self.requests)
        try:
            self._broadcaster.run(command, BATCH, tokens=plan.tokens, choose=sampling.choose, flags=flags, later=not plan.alone)
        except EpCommandFailed as error:
            log.warning("step failed on every rank and is recomputed: %s", error)
            self._publish(self._scheduler.fail(plan, str(error)))
            return False
        self._in_flight.append(sampling.pending())
        return digest_due

    # Reading

    def _await(self, ready: Callable[[], bool]) -> None:
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

    def _read(self) -> None:
        pending = self._in_flight[0]
        self._await(pending.ready)
        if len(self._in_flight) == 1:
            self._broadcaster.settle()  # of earlier steps it was done before the next one was sent
        self._in_flight.popleft()
        result, failures = pending.read()
        for request_id, message in failures:
            self._scheduler.reject([request_id], message)
        self._publish(self._scheduler.complete(result))

    def _read_all(self) -> None:
        while self._in_flight:
            self._read()

    def _publish(self, updates: list[SequenceUpdate]) -> None:
        """Hand on updates, at most one message a step; without any, a sign of life once a second."""
        now = time.monotonic()
        if not updates and (now - self._last_publish < SIGN_OF_LIFE_S or self._port.congested):
            return
        self._last_publish = now
        for update in updates:
            if update.finish is not None:
                self.requests.remove(update.request_id)
            elif update.tokens:
                self.requests.expect_mask(update.request_id, now)
        self._port.publish(Results(epoch=self.epoch, updates=updates, stats=self._stats()))

    def _stats(self) -> EngineStats:
        counts = self._scheduler.stats()
        return EngineStats(
            step=self._broadcaster.step,
            ranks=self._broadcaster.last_steps,
            host_seconds=self.host_seconds,
            **counts._replace(waiting=counts.waiting + len(self._intake))._asdict(),
        )

    # Waiting

    def _reject_late_masks(self) -> None:
        """A row waits for its own mask alone, and not for ever."""
        now = time.monotonic()
        if self._port.congested:
            # What asks for the masks waits here.
            self.requests.restart_clocks(now)
        for request_id in self.requests.late_masks(now - self._mask_deadline_s):
            text = f"the grammar's mask for the next token did not come within {self._mask_deadline_s:g} s"
            self._scheduler.reject([request_id], text)

    def _rest(self) -> None:
        """Nothing can be launched and nothing is under way: keep in touch with the ranks, and compare them once after work."""
        self._page.enter(Phase.WAITING)
        if time.monotonic() - self._last_command < PING_INTERVAL_S:
            return
        self._last_command = time.monotonic()
        if self._checked or not self.idle:
            self._broadcaster.run(Ping(), BATCH)
            return
        self._checked = True
        self._compare()
        self._check_books()

    # Divergence

    def _compare(self) -> None:
        """Have every rank say what it holds; EpDiverged, naming the sections and the ranks, when they differ."""
        try:
            self._broadcaster.run(Digest(), BATCH)
        except EpCommandFailed as error:
            raise EpDiverged(f"no rank can say what it holds: {error}") from error

    def _check_books(self) -> None:
        """EpDiverged when something is left, or does not add up, in what the head keeps while no request lives."""
        try:
            self._scheduler.check_integrity()
            self._sampler.check_integrity()
            if self._encoder is not None:
                self._encoder.check_integrity()
            self.requests.check_integrity(self._scheduler.live())
        except (SchedulerError, AssertionError, ValueError) as error:
            raise EpDiverged(f"the head's books do not add up when idle: {error}") from error
        held = {state.slot for state in self._broadcaster.slots if state is not None}
        if held or self._sampling_slots:
            raise EpDiverged(f"no request lives, but slots {sorted(held)} are held, and {sorted(self._sampling_slots)} sample")

    def _report_tables(self) -> None:
        """Have every rank that still answers log its slot table. The epoch is over, whatever comes of it."""
        try:
            self._broadcaster.run(Digest(report=True), BATCH, deadline_s=REPORT_DEADLINE_S)
        except (EpCommandFailed, EpLinkLost) as error:
            log.warning("after the divergence: %s", error)
