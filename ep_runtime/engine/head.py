"""The head's loop: plan a step, broadcast it, run it, read the results of the step before.

Step n+1 is planned and launched while step n is on the device; results are read when they are ready, and awaited only when two
steps are under way. On a CPU a launched step is a finished one, so its results are read before the next plan is made.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from ep_runtime.engine.broadcast import Broadcaster
from ep_runtime.engine.pending import PendingStep
from ep_runtime.engine.requests import RequestTable
from ep_runtime.engine.sampling.checks import mask_fault, submission_fault
from ep_runtime.engine.step_sampling import StepSampling
from ep_runtime.scheduler.core import Plan
from ep_runtime.scheduler.results import refused
from protocol.commands import BATCH, Alloc, Digest, Free, Ping, Shutdown, Warm, forward_command
from protocol.errors import EpCommandFailed
from protocol.messages import Abort, EngineStats, Mask, Results, SequenceUpdate, Submit, ToEngine
from protocol.preamble import RECORD_ROUTING

if TYPE_CHECKING:
    from ep_runtime.engine.port import Port
    from ep_runtime.engine.sampler import Sampler
    from ep_runtime.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

LOOKAHEAD = 2
"""Steps under way at most: one on the device, one launched behind it."""

IDLE_WAIT_S = 0.2
POLL_S = 20e-6
"""Between looks at a device event: short against a step, long enough to leave the core to others."""

PING_INTERVAL_S = 1.0
SIGN_OF_LIFE_S = 1.0


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
        check_epoch: Callable[[], None] = lambda: None,
        announce: Callable[[], None] = lambda: None,
    ) -> None:
        self.epoch = epoch
        self.requests = RequestTable()
        self._broadcaster = broadcaster
        self._scheduler = scheduler
        self._sampler = sampler
        self._port = port
        self._digest_interval = digest_interval
        self._read_when_ready = read_when_ready
        self._in_flight: deque[PendingStep] = deque()
        self._mask_deadline_s = mask_deadline_s
        self._check_epoch = check_epoch
        self._announce = announce
        self._last_announce = -SIGN_OF_LIFE_S
        self._last_command = time.monotonic()
        self._last_publish = 0.0
        self._forwards = 0
        self._sampling_slots: set[int] = set()
        self._leaving = False

    def warm(self, buckets: list[int], deadline_s: float) -> None:
        """Have every rank connect, compile and capture before the first request, within `deadline_s` seconds."""
        self._broadcaster.run(Warm(buckets=buckets), BATCH, deadline_s=deadline_s)

    def run(self, stopping: Callable[[], bool], grace_left: Callable[[], float]) -> None:
        """Serve until `stopping()`; finish what runs while `grace_left()` seconds last; then `shutdown`."""
        while not stopping():
            self.turn()
        while not self.idle and grace_left() > 0:
            self._check_epoch()
            self.turn(idle_wait_s=0.0)
        self.shutdown()

    @property
    def idle(self) -> bool:
        """True when no sequence is alive and no result is unread."""
        return self._scheduler.idle and not self._in_flight

    def turn(self, idle_wait_s: float = IDLE_WAIT_S) -> None:
        """Receive, read what is ready, launch at most one step; waits only when there is nothing to launch."""
        now = time.monotonic()
        if now - self._last_announce >= SIGN_OF_LIFE_S:
            # A frontend that started later learns of this epoch from the repetition.
            self._last_announce = now
            self._announce()
        self._receive(idle_wait_s if self.idle else 0.0)
        while self._in_flight and self._read_when_ready and self._in_flight[0].ready():
            self._read()
        plan = self._scheduler.plan() if len(self._in_flight) < LOOKAHEAD else None
        if plan is not None:
            self._launch(plan)
        elif self._in_flight:
            self._read()
        else:
            self._rest()

    def shutdown(self) -> None:
        """End what is left as aborted, free every slot, and let the workers leave. New requests are refused from here on."""
        self._leaving = True
        self._scheduler.abort(self.requests.ids())
        while not self.idle:
            self.turn(idle_wait_s=0.0)
        self._publish(self._scheduler.drain_updates())
        self._broadcaster.run(Shutdown(), BATCH)

    # Receiving

    def _receive(self, wait_s: float) -> None:
        for message in self._port.receive(wait_s):
            self._accept(message)
        self._publish(self._scheduler.drain_updates())

    def _accept(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort():
                self._scheduler.abort(message.request_ids)
            case Mask():
                fault = mask_fault(message.mask)
                if fault is None:
                    self.requests.set_mask(message)
                else:
                    self._scheduler.reject([message.request_id], fault)

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
        elif (fault := submission_fault(message, self._sampler.vocab_size)) is not None:
            answer = refused(request_id, fault, 400)
        else:
            answer = self._scheduler.submit(message)
        if answer is None:
            self.requests.add(message)
        else:
            self._publish([answer])

    # Launching

    def _launch(self, plan: Plan) -> None:
        self._last_command = time.monotonic()
        for slot in plan.frees:
            self._broadcaster.run(Free(), slot)
            if slot in self._sampling_slots:
                self._sampling_slots.remove(slot)
                self._sampler.stop(slot)
        if not self._allocate(plan):
            return
        self._scheduler.launched(plan)
        if plan.spans:
            self._forward(plan)

    def _allocate(self, plan: Plan) -> bool:
        """ALLOC every new slot. A request whose ALLOC is voted down gets the error, and the plan is made again without it."""
        allocated: list[int] = []
        for alloc in plan.allocs:
            command = Alloc(
                token_budget=alloc.token_budget,
                adapter=alloc.adapter,
                prefix_length=alloc.prefix_length,
                prefix_blocks=list(alloc.prefix_blocks),
            )
            try:
                self._broadcaster.run(command, alloc.slot)
            except EpCommandFailed as error:
                self._scheduler.discard(plan, allocated)
                self._scheduler.reject([alloc.request_id], str(error))
                return False
            allocated.append(alloc.slot)
            request = self.requests[alloc.request_id]
            generated = self._scheduler.generated(alloc.request_id)
            self._sampler.start(alloc.slot, request.sampling, request.prompt, generated)
            self._sampling_slots.add(alloc.slot)
        return True

    def _forward(self, plan: Plan) -> None:
        command = forward_command(list(plan.spans))
        digest_due = self._digest_interval > 0 and self._forwards % self._digest_interval == self._digest_interval - 1
        self._forwards += 1
        flags = RECORD_ROUTING if digest_due else 0
        sampling = StepSampling(plan, self._sampler, self.requests, self._await_masks)
        try:
            self._broadcaster.run(command, BATCH, tokens=plan.tokens, choose=sampling.choose, flags=flags)
        except EpCommandFailed as error:
            log.warning("step failed on every rank and is recomputed: %s", error)
            self._publish(self._scheduler.fail(plan, str(error)))
            return
        self._in_flight.append(sampling.pending())
        if digest_due:
            self._broadcaster.run(Digest(), BATCH)

    # Reading

    def _read(self) -> None:
        pending = self._in_flight[0]
        while not pending.ready():
            self._check_epoch()
            time.sleep(POLL_S)
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
        if not updates and now - self._last_publish < SIGN_OF_LIFE_S:
            return
        self._last_publish = now
        for update in updates:
            if update.finish is not None:
                self.requests.remove(update.request_id)
        self._port.publish(Results(epoch=self.epoch, updates=updates, stats=self._stats()))

    def _stats(self) -> EngineStats:
        return EngineStats(step=self._broadcaster.step, ranks=self._broadcaster.last_steps, **asdict(self._scheduler.stats()))

    # Waiting

    def _await_masks(self, needed: list[tuple[str, int]]) -> None:
        """Return when every needed mask is here or its request is over.

        A mask depends on the token before, so the results of earlier steps go out first.
        """
        self._read_all()
        deadline = time.monotonic() + self._mask_deadline_s
        while missing := self.requests.missing_masks(needed):
            self._check_epoch()
            self._broadcaster.check()
            if time.monotonic() > deadline:
                for request_id, index in missing:
                    text = f"the grammar's mask for token {index} did not come within {self._mask_deadline_s:g} s"
                    self._scheduler.reject([request_id], text)
            self._receive(IDLE_WAIT_S)

    def _rest(self) -> None:
        if time.monotonic() - self._last_command >= PING_INTERVAL_S:
            self._broadcaster.run(Ping(), BATCH)
            self._last_command = time.monotonic()
