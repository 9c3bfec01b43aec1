"""How a model's images and videos are cut to size: plain data that also travels to the decoding processes."""

from __future__ import annotations

import msgspec


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """Of one image: `shortest` and `longest` bound height x width in pixels after resizing (transformers' size.shortest_edge and
    size.longest_edge). `resample` is Pillow's number of the filter.
    """

    patch: int
    merge: int
    shortest: int
    longest: int
    resample: int

    @property
    def unit(self) -> int:
        """Pixels of a side of what one row of the prompt stands for."""
        return self.patch * self.merge


class VideoRules(msgspec.Struct, frozen=True, kw_only=True):
    """Of one video: `shortest` and `longest` bound frames x height x width in pixels. `group` frames are encoded together.

    `fps` frames a second are taken, between `min_frames` and `max_frames`. `frame_tokens`, where given, bounds the rows of a frame.
    """

    patch: int
    merge: int
    group: int
    shortest: int
    longest: int
    resample: int
    fps: float
    min_frames: int
    max_frames: int
    frame_tokens: int | None = None

    @property
    def unit(self) -> int:
        """Pixels of a side of what one row of the prompt stands for."""
        return self.patch * self.merge
