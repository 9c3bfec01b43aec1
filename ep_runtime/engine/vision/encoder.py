"""Encodes images of several requests in one pass, a slice at a time, so that steps of others fit between.

The device's work is launched and never waited for: rows are in the cache as soon as their last slice is launched, and whatever
uses them follows on the same stream. At most SLICES_AHEAD slices are on the device at once. Pixels go there in pieces, too.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ep_runtime.engine.out_of_memory import let_go
from ep_runtime.engine.vision.pixels import PixelUpload
from protocol.ack import FATAL_CODES, ErrorCode, error_code
from protocol.errors import EpCommandFailed

if TYPE_CHECKING:
    from ep_runtime.engine.vision.cache import EncodedImages
    from model.spec import VisionSpec
    from model.vision.tower import Encoding, VisionTower
    from protocol.messages import VisionInput

log = logging.getLogger(__name__)

SLICES_AHEAD = 2
"""One slice on the device, one launched behind it: as many as the head's steps."""

PASS_IMAGES = 32
"""Images of a pass: each size among them takes launches of its own in every block, however small it is."""


@dataclass(frozen=True, slots=True)
class WantedImage:
    """An image and the request that needs it. `alone`: the request is a suspect's, and shares a pass with no other."""

    request_id: str
    image: VisionInput
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """A request whose image cannot be encoded, and its answer."""

    request_id: str
    message: str
    status: int


@dataclass(slots=True)
class _Pass:
    """Images that are encoded together, `layers` blocks a slice; `encoding` is there once their patches are embedded."""

    wanted: tuple[WantedImage, ...]
    layers: int
    upload: PixelUpload | None = None
    encoding: Encoding | None = None


class ImageEncoder:
    """Owns the pass under way. `slice_cost` bounds a slice in floating point operations, `pass_rows` a pass in rows.

    A slice is one block of one image at least, whatever that costs.
    """

    def __init__(
        self,
        tower: VisionTower,
        spec: VisionSpec,
        cache: EncodedImages,
        device: torch.device,
        *,
        slice_cost: float,
        pass_rows: int,
        offer: Callable[[torch.Tensor], None],
    ) -> None:
        self.cache = cache
        self.spec = spec
        self._tower = tower
        self._unit = spec.patch * spec.merge
        self._device = device
        self._slice_cost = slice_cost
        self._pass_rows = pass_rows
        self._offer = offer
        self._pass: _Pass | None = None
        self._singly: set[bytes] = set()
        self._slices: deque[torch.cuda.Event] = deque()

    @property
    def busy(self) -> bool:
        """True while a pass is under way."""
        return self._pass is not None

    @property
    def requests(self) -> list[str]:
        """The requests of the pass under way, in the order of its images."""
        return [] if self._pass is None else list(dict.fromkeys(wanted.request_id for wanted in self._pass.wanted))

    @property
    def suspect(self) -> str:
        """The suspect that has the pass to itself; empty when others may run beside it."""
        return self._pass.wanted[0].request_id if self._pass is not None and self._pass.wanted[0].alone else ""

    def begin(self, wanted: Sequence[WantedImage]) -> None:
        """Start a pass over the first of these images that are not in the cache, if there are any. None is under way.

        Those that are in the cache stay there: together they are no more than it holds.
        """
        self.cache.keep([one.image.digest for one in wanted])
        missing = [one for one in wanted if one.image.digest not in self.cache]
        self._singly.intersection_update([one.image.digest for one in missing])
        if missing:
            chosen = self._choose(missing)
            layers = int(self._slice_cost // self._tower.layer_cost([one.image for one in chosen]))
            self._pass = _Pass(chosen, max(1, layers))

    def ready(self) -> bool:
        """True when another slice may be launched; a CPU has done what was launched."""
        return self._unfinished() < SLICES_AHEAD

    def done(self) -> bool:
        """True when the device has nothing left of what was launched."""
        return self._unfinished() == 0

    def advance(self) -> list[Failure]:
        """Launch the next slice of the pass under way; returns the requests that must fail. Errors of the device are raised."""
        run = self._pass
        assert run is not None, "no pass is under way"
        failures: list[Failure] = []
        try:
            with torch.inference_mode():
                over = self._slice(run)
        except Exception as error:
            if error_code(error) in FATAL_CODES:
                raise
            failures = self._fail(run, error)
        else:
            self._pass = None if over else run
        if self._device.type == "cuda":
            self._slices.append(torch.cuda.Event())
            self._slices[-1].record()
        return failures

    def drop(self) -> None:
        """Nobody waits for the pass under way any more, if there is one."""
        self._pass = None

    def offer(self, digests: Sequence[bytes]) -> None:
        """Offer the rows of these images, all in the cache, for the VISION that is sent next.

        Raises EpCommandFailed when there is no memory to put them together; nothing has been sent.
        """
        if not digests:
            return
        try:
            with torch.inference_mode():
                rows = torch.cat([self.cache.rows(digest) for digest in digests])
        except Exception as error:
            if error_code(error) is not ErrorCode.OUT_OF_MEMORY:
                raise
            let_go(error)
            raise EpCommandFailed(f"out of memory for the rows of {len(digests)} images") from error
        self._offer(rows)

    def check_integrity(self) -> None:
        """ValueError when the cache's books do not add up."""
        self.cache.check_integrity()

    def _choose(self, missing: Sequence[WantedImage]) -> tuple[WantedImage, ...]:
        """The images of the next pass, in order: the first one, and others as far as rows and cost allow."""
        first = missing[0]
        if first.image.digest in self._singly:
            return (first,)
        # Images attend to themselves alone, so costs add up.
        chosen, rows, cost = [first], first.image.rows, self._tower.layer_cost([first.image])
        for one in missing[1:]:
            beside = one.request_id == first.request_id if first.alone else not one.alone
            if not beside or one.image.digest in self._singly:
                continue
            rows += one.image.rows
            cost += self._tower.layer_cost([one.image])
            if rows > self._pass_rows or cost > self._slice_cost or len(chosen) == PASS_IMAGES:
                break
            chosen.append(one)
        return tuple(chosen)

    def _slice(self, run: _Pass) -> bool:
        """Copy pixels and embed the last of them, or run some blocks, or take the rows, which ends the pass: True."""
        if run.encoding is None:
            if run.upload is None:
                run.upload = PixelUpload([one.image for one in run.wanted], self._unit, self._device)
            if run.upload.advance():
                run.encoding = self._tower.begin(run.upload.pixels())
                run.upload = None
            return False
        if run.encoding.remaining_layers:
            self._tower.advance(run.encoding, run.layers)
            return False
        for one, rows in zip(run.wanted, self._tower.rows(run.encoding), strict=True):
            self.cache.put(one.image.digest, rows)
            self._singly.discard(one.image.digest)
        return True

    def _fail(self, run: _Pass, error: Exception) -> list[Failure]:
        """A pass of one image fails its request; the images of a larger one are tried singly, since one of them may be at fault."""
        let_go(error)
        embedded = run.encoding is not None
        self._pass = run.encoding = run.upload = None
        if len(run.wanted) > 1:
            log.warning("encoding %d images together failed, they are tried singly: %s", len(run.wanted), error)
            self._singly.update(one.image.digest for one in run.wanted)
            return []
        (one,) = run.wanted
        self._singly.discard(one.image.digest)
        unfit = not embedded and error_code(error) in (ErrorCode.VALUE, ErrorCode.MODEL)
        image = one.image
        log.warning("an image of request %s cannot be encoded: %s", one.request_id, error)
        text = f"the image at position {image.start}, of {image.height} x {image.width} tokens, cannot be encoded: {error}"
        return [Failure(one.request_id, text, 400 if unfit else 500)]

    def _unfinished(self) -> int:
        while self._slices and self._slices[0].query():
            self._slices.popleft()
        return len(self._slices)
