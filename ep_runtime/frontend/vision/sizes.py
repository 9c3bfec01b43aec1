"""Sizes after resizing, frames that are taken of a video, and their times: the formulas of transformers' Qwen processors. Pure."""

from __future__ import annotations

import math

from ep_runtime.frontend.vision.errors import MediaError
from ep_runtime.frontend.vision.rules import ImageRules, VideoRules

MAX_SIDE = 8192
"""Pixels of a side of what is decoded."""
MAX_PIXELS = 40_000_000
"""Pixels of one decoded picture: at 4 bytes each, three copies of them fit a decoding process."""
MAX_RATIO = 200


def check_source_size(width: int, height: int) -> None:
    """Raise MediaError when a picture of this size is not decoded."""
    if width < 1 or height < 1:
        raise MediaError(f"has {width} x {height} pixels")
    if max(width, height) > MAX_SIDE:
        raise MediaError(f"has {width} x {height} pixels; a side may have {MAX_SIDE}")
    if width * height > MAX_PIXELS:
        raise MediaError(f"has {width} x {height} pixels, {width * height} in all; the server decodes {MAX_PIXELS}")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise MediaError(f"has {width} x {height} pixels; one side may be {MAX_RATIO} times the other")


def image_size(height: int, width: int, rules: ImageRules) -> tuple[int, int]:
    """Height and width after resizing: multiples of `rules.unit`, as near to the image's as the bounds on their product allow."""
    unit = rules.unit
    return _bounded(height, width, 1, unit, rules.shortest, rules.longest, round(height / unit) * round(width / unit) * unit**2)


def video_size(frames: int, height: int, width: int, rules: VideoRules) -> tuple[int, int]:
    """As `image_size`, for each of a video's frames: the bounds are on the pixels of all of them."""
    unit = rules.unit
    if frames < rules.group:
        raise MediaError(f"gives {frames} frames; the model takes {rules.group} at a time")
    longest = rules.longest
    if rules.frame_tokens is not None:
        longest = max(min(rules.frame_tokens * unit**2, longest // frames), int(rules.shortest * 1.05)) * frames
    if height < unit or width < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    whole = round(frames / rules.group) * rules.group
    return _bounded(
        height, width, frames, unit, rules.shortest, longest, whole * round(height / unit) * round(width / unit) * unit**2
    )


def _bounded(height: int, width: int, frames: int, unit: int, shortest: int, longest: int, pixels: int) -> tuple[int, int]:
    if pixels > longest:
        scale = math.sqrt(frames * height * width / longest)
        return max(unit, math.floor(height / scale / unit) * unit), max(unit, math.floor(width / scale / unit) * unit)
    if pixels < shortest:
        scale = math.sqrt(shortest / (frames * height * width))
        return math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit
    return round(height / unit) * unit, round(width / unit) * unit


def frame_indices(total: int, rate: float, rules: VideoRules) -> list[int]:
    """Which of a video's `total` frames are taken, evenly from the first to the last. `rate` is the video's frames a second."""
    count = min(max(int(total / rate * rules.fps), rules.min_frames), rules.max_frames, total)
    if count == 1:
        return [0]
    step = (total - 1) / (count - 1)
    return [round(index * step) for index in range(count - 1)] + [total - 1]


def group_seconds(indices: list[int], rate: float, group: int) -> list[float]:
    """The time of each group of frames: half way between its first and its last. The last frame fills an incomplete group."""
    padded = indices + [indices[-1]] * (-len(indices) % group)
    times = [index / rate for index in padded]
    return [(times[first] + times[first + group - 1]) / 2 for first in range(0, len(times), group)]
