"""From a plan to its commands: FREE, ALLOC and VISION for each slot, then the one forward."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ep_runtime.engine.step_sampling import StepSampling
from protocol.commands import BATCH, Alloc, Free, forward_command
from protocol.errors import EpCommandFailed
from protocol.preamble import RECORD_ROUTING

if TYPE_CHECKING:
    from ep_runtime.engine.broadcast import Broadcaster
    from ep_runtime.engine.in_flight import StepsInFlight
    from ep_runtime.engine.outbox import Outbox
    from ep_runtime.engine.requests import RequestTable
    from ep_runtime.engine.sampler import Sampler
    from ep_runtime.engine.vision.turns import ImageTurns
    from ep_runtime.scheduler.core import Plan, SlotAlloc
    from ep_runtime.scheduler.scheduler import Scheduler
    from protocol.progress import ProgressPage

log = logging.getLogger(__name__)


class Launcher:
    """Sends plans to the ranks, and starts and stops the sampler's slots with theirs: `sampling_slots` are those that sample.

    Every `digest_interval`-th forward records what the ranks are to be compared by; 0 for none.
    """

    def __init__(
        self,
        broadcaster: Broadcaster,
        scheduler: Scheduler,
        sampler: Sampler,
        requests: RequestTable,
        in_flight: StepsInFlight,
        images: ImageTurns,
        outbox: Outbox,
        page: ProgressPage,
        *,
        digest_interval: int,
    ) -> None:
        self.sampling_slots: set[int] = set()
        self._broadcaster = broadcaster
        self._scheduler = scheduler
        self._sampler = sampler
        self._requests = requests
        self._in_flight = in_flight
        self._images = images
        self._outbox = outbox
        self._page = page
        self._digest_interval = digest_interval
        self._forwards = 0

    def launch(self, plan: Plan) -> bool:
        """Launch a step; True when the ranks are to be compared after it. A suspect's is alone on the device, and read here."""
        if plan.alone:
            self._in_flight.read_all()
            self._images.wait_done()
        for slot in plan.frees:
            self._broadcaster.run(Free(), slot)
            if slot in self.sampling_slots:
                self.sampling_slots.remove(slot)
                self._sampler.stop(slot)
        if plan.alone:
            self._page.set_alone(plan.owners[0])
        digest_due = False
        if self._allocate(plan):
            self._scheduler.launched(plan)
            if plan.spans:
                digest_due = self._forward(plan)
        if plan.alone:
            self._in_flight.wait_first()
            self._page.set_alone("")
            self._in_flight.read_all()
        return digest_due

    def _allocate(self, plan: Plan) -> bool:
        """ALLOC every new slot, and show it its images.

        A request for which that is voted down gets the error, and the plan is made again without it.
        """
        allocated: list[int] = []
        for alloc in plan.allocs:
            try:
                self._broadcaster.run(alloc_command(alloc), alloc.slot)
                allocated.append(alloc.slot)
                self._images.show(alloc)
            except EpCommandFailed as error:
                self._scheduler.discard(plan, allocated)
                self._scheduler.reject([alloc.request_id], str(error))
                return False
            request = self._requests[alloc.request_id]
            generated = self._scheduler.generated(alloc.request_id)
            self._sampler.start(alloc.slot, request.sampling, request.prompt, generated)
            self.sampling_slots.add(alloc.slot)
        return True

    def _forward(self, plan: Plan) -> bool:
        """Launch the plan's rows. True when the ranks are to be compared after it."""
        command = forward_command(list(plan.spans))
        digest_due = self._digest_interval > 0 and self._forwards % self._digest_interval == self._digest_interval - 1
        self._forwards += 1
        flags = RECORD_ROUTING if digest_due else 0
        sampling = StepSampling(plan, self._sampler, self._requests)
        try:
            self._broadcaster.run(command, BATCH, tokens=plan.tokens, choose=sampling.choose, flags=flags, later=not plan.alone)
        except EpCommandFailed as error:
            log.warning("step failed on every rank and is recomputed: %s", error)
            self._outbox.publish(self._scheduler.fail(plan, str(error)))
            return False
        self._in_flight.add(sampling.pending())
        return digest_due


def alloc_command(alloc: SlotAlloc) -> Alloc:
    """A new slot as every rank is told of it."""
    return Alloc(
        token_budget=alloc.token_budget,
        prompt_length=alloc.prompt_length,
        adapter=alloc.adapter,
        owner_rank=alloc.owner,
        prefix_length=alloc.prefix_length,
        prefix_blocks=list(alloc.prefix_blocks),
        loops=alloc.loops,
    )
