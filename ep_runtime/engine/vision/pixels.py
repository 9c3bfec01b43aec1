"""Pixels of images on their way from a request to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from model.vision.patches import ImagePixels

if TYPE_CHECKING:
    from protocol.messages import VisionInput

PIECE_BYTES = 16 << 20
"""Copied through pinned memory between two steps: a few milliseconds of the head's thread."""


class PixelUpload:
    """The pixels of some images, at most `piece_bytes` an `advance`, by asynchronous copies; `unit` pixels are a row's side."""

    def __init__(self, images: Sequence[VisionInput], unit: int, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        self._images = images
        self._unit = unit
        self._piece = piece_bytes
        self._starts = np.cumsum([0, *[len(image.pixels) for image in images]]).tolist()
        self._done = 0
        self._moved = torch.empty(self._starts[-1], dtype=torch.uint8, device=device)

    def advance(self) -> bool:
        """Copy the next piece; True when none is left."""
        stop = min(self._done + self._piece, len(self._moved))
        target = self._moved[self._done : stop]
        if target.device.type == "cpu":
            self._gather(target.numpy(), self._done)
        else:
            # torch's pinned allocator keeps the buffer until the copy is done.
            host = torch.empty(len(target), dtype=torch.uint8, pin_memory=True)
            self._gather(host.numpy(), self._done)
            target.copy_(host, non_blocking=True)
        self._done = stop
        return stop == len(self._moved)

    def pixels(self) -> list[ImagePixels]:
        """The images, once all is copied."""
        unit, parts = self._unit, zip(self._images, self._starts, self._starts[1:], strict=False)
        return [
            ImagePixels(
                frames=image.frames,
                height=image.height,
                width=image.width,
                pixels=self._moved[start:stop].view(image.frames, image.height * unit, image.width * unit, 3),
            )
            for image, start, stop in parts
        ]

    def _gather(self, target: np.ndarray, first: int) -> None:
        """The bytes from `first` on of all images, one behind the other, as many as `target` holds."""
        for image, start in zip(self._images, self._starts, strict=False):
            begin, end = max(first, start), min(first + len(target), start + len(image.pixels))
            if begin < end:
                part = np.frombuffer(image.pixels, np.uint8, count=end - begin, offset=begin - start)
                target[begin - first : end - first] = part
