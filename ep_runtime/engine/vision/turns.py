"""When images are encoded: a slice between two steps, never beside pieces of prompts. While both are due they take turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_runtime.engine.vision.encoder import WantedImage
from protocol.commands import Vision, VisionGrid
from protocol.progress import Phase, ProgressPage

if TYPE_CHECKING:
    from ep_runtime.engine.broadcast import Broadcaster
    from ep_runtime.engine.in_flight import StepsInFlight
    from ep_runtime.engine.outbox import Outbox
    from ep_runtime.engine.requests import RequestTable
    from ep_runtime.engine.vision.encoder import ImageEncoder
    from ep_runtime.scheduler.core import Plan, SlotAlloc
    from ep_runtime.scheduler.scheduler import Scheduler


class ImageTurns:
    """Gives the encoder its turns and its images. Without an encoder no image is ever due."""

    def __init__(
        self,
        encoder: ImageEncoder | None,
        broadcaster: Broadcaster,
        scheduler: Scheduler,
        requests: RequestTable,
        in_flight: StepsInFlight,
        outbox: Outbox,
        page: ProgressPage,
    ) -> None:
        self._encoder = encoder
        self._broadcaster = broadcaster
        self._scheduler = scheduler
        self._requests = requests
        self._in_flight = in_flight
        self._outbox = outbox
        self._page = page
        self._slice_next = False

    def begin(self) -> bool:
        """Begin to encode the images that come next, unless a pass is under way. False when nothing is to be encoded.

        A suspect's slice is launched here: it is alone on the device, like a suspect's steps, and what is in flight is read before.
        """
        encoder = self._encoder
        if encoder is None:
            return False
        if encoder.busy and not any(self._scheduler.waits(request_id) for request_id in encoder.requests):
            encoder.drop()  # they have ended, or started with a prefix that another one has computed meanwhile
        if not encoder.busy and self._scheduler.images_due:
            wanted = self._scheduler.next_images(encoder.cache.capacity_rows, encoder.cache)
            encoder.begin([WantedImage(w.request_id, self._requests[w.request_id].images[w.index], w.alone) for w in wanted])
        if not encoder.busy:
            return False
        if encoder.suspect:
            self._in_flight.read_all()
            self._in_flight.wait(encoder.done)
            self._page.set_alone(encoder.suspect)
            self._advance(encoder)
            self._in_flight.wait(encoder.done)
            self._page.set_alone("")
        return True

    def plan(self) -> Plan | None:
        """The scheduler's next plan, of sequences whose images are encoded; without pieces of prompts when it is a slice's turn."""
        encoder = self._encoder
        if encoder is None:
            return self._scheduler.plan()
        return self._scheduler.plan(encoder.cache, prompts=not (self._slice_next and _may_encode(encoder)))

    def launch_before(self, plan: Plan | None) -> None:
        """Launch the next slice in front of this plan's step. Behind a step with pieces of prompts, a slice's turn comes first."""
        encoder = self._encoder
        if encoder is None or not _may_encode(encoder):
            return
        self._slice_next = plan is not None and bool(plan.tokens)
        if not self._slice_next:
            self._advance(encoder)

    def wait_ready(self) -> None:
        """Return when another slice may be launched."""
        if self._encoder is not None:
            self._in_flight.wait(self._encoder.ready)

    def wait_done(self) -> None:
        """Return when the device has no slice left."""
        if self._encoder is not None:
            self._in_flight.wait(self._encoder.done)

    def show(self, alloc: SlotAlloc) -> None:
        """VISION of a new slot whose prompt has images: the rows of those outside its prefix are in the encoder's cache."""
        if not alloc.images or self._encoder is None:
            return
        needed = alloc.images[alloc.skipped :]
        grids = [VisionGrid(image.start, image.height, image.width) for image in self._requests[alloc.request_id].images]
        self._encoder.offer([image.digest for image in needed])
        command = Vision(grids=grids, rows=sum(image.rows for image in needed), skipped=alloc.skipped)
        self._broadcaster.run(command, alloc.slot)

    def drop(self) -> None:
        """Nobody waits for images any more."""
        if self._encoder is not None:
            self._encoder.drop()

    def check_integrity(self) -> None:
        """ValueError when the books of encoded images do not add up."""
        if self._encoder is not None:
            self._encoder.check_integrity()

    def _advance(self, encoder: ImageEncoder) -> None:
        """One slice. A request whose image cannot be encoded gets the error."""
        self._page.enter(Phase.EXECUTING)
        for failure in encoder.advance():
            self._scheduler.reject([failure.request_id], failure.message, failure.status)
        self._outbox.drain()


def _may_encode(encoder: ImageEncoder) -> bool:
    """Whether the next slice may go in front of a step."""
    return encoder.busy and not encoder.suspect and encoder.ready()
