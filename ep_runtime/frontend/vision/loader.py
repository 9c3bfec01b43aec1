"""From the parts of a request to decoded images and videos: fetched, decoded, and counted as held memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.vision.decoders import Decoders
from ep_runtime.frontend.vision.errors import MediaError
from ep_runtime.frontend.vision.fetching import Fetcher
from ep_runtime.frontend.vision.jobs import Decoded, ImageJob, VideoJob
from ep_runtime.frontend.vision.memory import Hold
from ep_runtime.frontend.vision.settings import VisionSettings
from ep_runtime.frontend.vision.sources import Source, data_source, file_source, scheme_of

REMOTE_AT_ONCE = 8
"""Images that are fetched, or wait for a decoding process with their contents in memory."""
INLINE_AT_ONCE = 4
"""The same for images whose contents came with the request, so that slow hosts do not hold them up."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image or video of a request; `where` names its field."""

    kind: Literal["image", "video"]
    url: str
    where: str


def refused(part: MediaPart, error: MediaError) -> ApiError:
    """The 400 for a part that cannot be used."""
    return ApiError(400, f"{part.where}: the {part.kind} {error}", param=part.where, code=f"invalid_{part.kind}")


class MediaLoader:
    """Loads a request's parts, several at a time. `folder` is where local files may be, `most` the bytes of one encoded part."""

    def __init__(self, settings: VisionSettings, fetcher: Fetcher, decoders: Decoders, *, folder: Path | None, most: int) -> None:
        self.settings = settings
        self._fetcher = fetcher
        self._decoders = decoders
        self._folder = folder
        self._most = most
        self._remote = asyncio.Semaphore(REMOTE_AT_ONCE)
        self._inline = asyncio.Semaphore(INLINE_AT_ONCE)

    async def load(self, parts: Sequence[MediaPart], hold: Hold) -> list[Decoded]:
        """What each part decodes to; the first that cannot be used ends them all. Raises ApiError."""
        hold.take(0)
        tasks = [asyncio.create_task(self._load(part, hold)) for part in parts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, part: MediaPart, hold: Hold) -> Decoded:
        try:
            scheme = scheme_of(part.url)
            async with self._inline if scheme == "data" else self._remote:
                decoded = await self._decode(part, await self._source(scheme, part.url))
            if not all(grid.fits(self.settings.image.unit) for grid in decoded.grids):
                # Rows are counted by these sizes, and a decoder may be in a file's hands.
                raise MediaError("cannot be decoded: its decoder answered with pixels of another size")
        except MediaError as error:
            raise refused(part, error) from None
        hold.take(decoded.size)
        return decoded

    async def _source(self, scheme: str, url: str) -> Source:
        match scheme:
            case "data":
                return data_source(url, self._most)
            case "file":
                return await asyncio.to_thread(file_source, url, self._folder, self._most)
            case _:
                return Source(await self._fetcher.fetch(url))

    async def _decode(self, part: MediaPart, source: Source) -> Decoded:
        if part.kind == "image":
            rules = self.settings.image
            image = ImageJob(data=source.data, base64=source.base64, media_type=source.media_type, rules=rules)
            return await self._decoders.decode(image, _most_pixels(rules.longest))
        video = self.settings.video
        assert video is not None, "checked with the model's inputs"
        job = VideoJob(data=source.data, base64=source.base64, media_type=source.media_type, rules=video)
        return await self._decoders.decode(job, _most_pixels(video.longest))

    def close(self) -> None:
        """End the decoding processes."""
        self._decoders.close()


def _most_pixels(longest: int) -> int:
    """Bytes that a decoder may answer with: sizes are rounded to whole rows, and small bounds by much."""
    return 6 * longest + 2**24
