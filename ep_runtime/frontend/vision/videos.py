"""Decodes one video. Runs in a decoding process, as `images` does."""

from __future__ import annotations

import io
from collections.abc import Iterator

import av
import av.container
import av.error
import av.video.frame
import av.video.stream
from PIL import Image

from ep_runtime.frontend.vision.errors import MediaError
from ep_runtime.frontend.vision.jobs import Decoded, Grid
from ep_runtime.frontend.vision.rules import VideoRules
from ep_runtime.frontend.vision.sizes import check_source_size, frame_indices, group_seconds, video_size

MEDIA_TYPES = {"mov": ("video/mp4", "video/quicktime"), "matroska": ("video/webm", "video/x-matroska")}
"""Containers by their demuxer: one that is not named could be a playlist, which names further files."""
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4")


def decode_video(data: bytes, media_type: str | None, rules: VideoRules) -> Decoded:
    """The groups of a video's sampled frames, RGB of the model's size. Raises MediaError."""
    demuxer = sniff(data)
    if demuxer is None:
        raise MediaError("is none of the formats that the server reads: MP4, QuickTime, WebM, Matroska")
    if media_type is not None and media_type not in MEDIA_TYPES[demuxer]:
        raise MediaError(f"is a {demuxer} file, but its media type is {media_type}")
    try:
        total, rate = measure(data, demuxer)
        indices = frame_indices(total, rate, rules)
        frames, height, width = sampled_frames(data, demuxer, indices, rules)
    except MemoryError:
        raise
    except av.error.FFmpegError as error:
        raise MediaError(f"cannot be decoded: {error.strerror}") from error
    frames += [frames[-1]] * (-len(frames) % rules.group)
    grids = []
    for first in range(0, len(frames), rules.group):
        pixels = b"".join(frames[first : first + rules.group])
        grids.append(Grid(frames=rules.group, height=height // rules.unit, width=width // rules.unit, pixels=pixels))
    return Decoded(grids=grids, seconds=group_seconds(indices, rate, rules.group))


def sniff(data: bytes) -> str | None:
    """The demuxer that a file's first bytes tell."""
    if data[4:8] == b"ftyp":
        return "mov"
    return "matroska" if data.startswith(b"\x1a\x45\xdf\xa3") else None


def open_video(data: bytes, demuxer: str) -> av.container.InputContainer:
    """The container over `data` alone: it can open nothing else."""
    return av.open(io.BytesIO(data), "r", format=demuxer, options={"protocol_whitelist": "none"}, metadata_errors="replace")


def video_stream(container: av.container.InputContainer) -> av.video.stream.VideoStream:
    """The first video stream; raises MediaError when there is none that the server decodes."""
    if not container.streams.video:
        raise MediaError("has no video in it")
    stream = container.streams.video[0]
    if stream.codec_context.codec.name not in CODECS:
        raise MediaError(f"is coded in {stream.codec_context.codec.name}; the server decodes {', '.join(CODECS)}")
    check_source_size(stream.codec_context.width, stream.codec_context.height)
    return stream


def measure(data: bytes, demuxer: str) -> tuple[int, float]:
    """Number of frames and frames a second. Where the container has no number its packets are counted."""
    with open_video(data, demuxer) as container:
        stream = video_stream(container)
        rate = float(stream.average_rate or 0)
        if rate <= 0:
            raise MediaError("has no frame rate")
        total = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
    if total < 1:
        raise MediaError("has no frame in it")
    return total, rate


def sampled_frames(data: bytes, demuxer: str, indices: list[int], rules: VideoRules) -> tuple[list[bytes], int, int]:
    """RGB bytes of the frames of these numbers, resized, and their height and width in pixels."""
    wanted, frames = set(indices), []
    height = width = 0
    source: tuple[int, int] | None = None
    with open_video(data, demuxer) as container:
        for index, picture in enumerate(decoded(container)):
            if index > indices[-1]:
                break
            if source is None:
                source = picture.width, picture.height
                check_source_size(*source)
                height, width = video_size(len(indices), picture.height, picture.width, rules)
            if (picture.width, picture.height) != source:
                raise MediaError("changes its size")
            if index in wanted:
                resized = picture.to_image().resize((width, height), resample=Image.Resampling(rules.resample))
                frames.append(resized.tobytes())
    if len(frames) < len(indices):
        raise MediaError(f"is cut off: {len(frames)} of the {len(indices)} frames to be taken are there")
    return frames, height, width


def decoded(container: av.container.InputContainer) -> Iterator[av.video.frame.VideoFrame]:
    """The pictures in the order of their times, by one thread."""
    stream = video_stream(container)
    stream.codec_context.thread_count = 1
    yield from container.decode(stream)
