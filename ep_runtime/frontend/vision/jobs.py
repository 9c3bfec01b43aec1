"""What the frontend and its decoding processes tell each other: msgpack structs, each behind its length as a little-endian u64."""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

from ep_runtime.frontend.vision.rules import ImageRules, VideoRules
from protocol.vision import pixel_digest

HEADER = struct.Struct("<Q")


class ImageJob(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Decode one image. `data` is the file, in base64 when so said; `media_type` what its sender calls it, if anything."""

    data: bytes
    base64: bool
    media_type: str | None
    rules: ImageRules


class VideoJob(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Decode one video; fields as in ImageJob."""

    data: bytes
    base64: bool
    media_type: str | None
    rules: VideoRules


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """An image, or one group of a video's frames: what `protocol.messages.VisionInput` says, without a place in a prompt."""

    height: int
    width: int
    frames: int
    pixels: bytes

    @property
    def rows(self) -> int:
        """Placeholder tokens that stand for it."""
        return self.height * self.width

    def fits(self, unit: int) -> bool:
        """Whether there are as many pixels as the sizes say, for rows of `unit` pixels a side."""
        return min(self.frames, self.height, self.width) > 0 and len(self.pixels) == 3 * self.frames * self.rows * unit**2

    def digest(self, unit: int) -> bytes:
        """`VisionInput.digest`, for rows of `unit` pixels a side.

        Not the decoding process's to say: one that a file has taken over could name another image's.
        """
        return pixel_digest((self.frames, self.height * unit, self.width * unit), self.pixels)


class Decoded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One grid for an image; for a video one for each of its groups, and their times in seconds."""

    grids: list[Grid]
    seconds: list[float] = []

    @property
    def size(self) -> int:
        """Bytes of all pixels."""
        return sum(len(grid.pixels) for grid in self.grids)


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """The message of the MediaError."""

    reason: str


Job = ImageJob | VideoJob
Reply = Decoded | Unusable


def frame(message: Job | Reply | None) -> list[bytes]:
    """The pieces of a message on the wire; None is the empty one, by which a process says that it is ready."""
    body = b"" if message is None else msgspec.msgpack.encode(message)
    return [HEADER.pack(len(body)), body]


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next message's body; None at the end of the stream."""
    header = stream.read(HEADER.size)
    return stream.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else None
