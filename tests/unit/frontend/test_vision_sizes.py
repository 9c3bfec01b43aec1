"""Sizes, sampled frames and times against transformers' own functions."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3VLProcessor
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as image_reference

from ep_runtime.frontend.vision.errors import MediaError
from ep_runtime.frontend.vision.rules import ImageRules, VideoRules
from ep_runtime.frontend.vision.sizes import check_source_size, frame_indices, group_seconds, image_size, video_size

SIDES = st.integers(1, 8192)
BOUNDS = st.tuples(st.integers(1, 2**16), st.integers(2**10, 2**25)).map(sorted)


def video_smart_resize() -> Callable[..., tuple[int, int]]:
    """transformers' function without its module, which is there with torchvision alone."""
    source = Path(image_reference.__file__).parents[1] / "qwen3_vl" / "video_processing_qwen3_vl.py"
    tree = ast.parse(source.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "smart_resize"]
    names: dict[str, Any] = {"math": math}
    exec(compile(tree, str(source), "exec"), names)
    return names["smart_resize"]


REFERENCE = video_smart_resize()


def checked_video_size(frames: int, height: int, width: int, rules: VideoRules) -> tuple[int, int]:
    check_source_size(width, height)
    return video_size(frames, height, width, rules)


def video_rules(**fields: Any) -> VideoRules:
    usual = {"patch": 16, "merge": 2, "group": 2, "shortest": 4096, "longest": 25165824, "resample": 3}
    return VideoRules(**{**usual, "fps": 2.0, "min_frames": 4, "max_frames": 768, **fields})


@given(height=SIDES, width=SIDES, bounds=BOUNDS, patch=st.sampled_from([4, 14, 16]))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_image_sizes_are_those_of_transformers(height: int, width: int, bounds: list[int], patch: int) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(MediaError, match="200 times the other"):
            check_source_size(width, height)
        return
    rules = ImageRules(patch=patch, merge=2, shortest=bounds[0], longest=bounds[1], resample=3)
    wanted = image_reference.smart_resize(height, width, factor=2 * patch, min_pixels=bounds[0], max_pixels=bounds[1])
    assert image_size(height, width, rules) == wanted


@given(frames=st.integers(1, 800), height=SIDES, width=SIDES, bounds=BOUNDS, cap=st.sampled_from([None, 16, 768]))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_video_sizes_are_those_of_transformers(frames: int, height: int, width: int, bounds: list[int], cap: int | None) -> None:
    rules = video_rules(shortest=bounds[0], longest=bounds[1], frame_tokens=cap)
    most = bounds[1]
    if cap is not None:  # as in its resize()
        most = max(min(cap * 32 * 32, bounds[1] // frames), int(bounds[0] * 1.05)) * frames
    try:
        wanted = REFERENCE(frames, height, width, temporal_factor=2, factor=32, min_pixels=bounds[0], max_pixels=most)
    except ValueError:
        # Its ratio is of sides that may have been stretched; ours is checked before.
        with pytest.raises(MediaError):
            checked_video_size(frames, height, width, rules)
        return
    if max(height, width) <= 200 * min(height, width):
        assert video_size(frames, height, width, rules) == wanted


@pytest.mark.parametrize("fields", [{}, {"fps": 1.0, "max_frames": 7}, {"min_frames": 1, "fps": 0.1}])
def test_frames_and_times_are_those_of_transformers(fields: dict[str, Any]) -> None:
    rules = video_rules(**fields)
    for total in (1, 2, 3, 4, 5, 9, 24, 100, 1000, 2401, 30000):
        for rate in (1.0, 10.0, 23.976, 24.0, 29.97, 60.0):
            # sample_frames of its video processor, which is there with torchvision alone.
            count = min(max(int(total / rate * rules.fps), rules.min_frames), rules.max_frames, total)
            wanted = np.linspace(0, total - 1, count).round().astype(int)
            indices = frame_indices(total, rate, rules)
            assert indices == wanted.tolist()
            assert group_seconds(indices, rate, 2) == Qwen3VLProcessor._calculate_timestamps(None, wanted, rate, 2)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((0, 5), "0 x 5"),
        ((10_000, 5), "10000 x 5 pixels; a side may have 8192"),
        ((5, 10_000), "5 x 10000"),
        ((8000, 8000), "64000000 in all"),
        ((2010, 10), "200 times"),
        ((-1, 10), "-1 x 10"),
    ],
)
def test_sizes_that_are_not_decoded(size: tuple[int, int], message: str) -> None:
    with pytest.raises(MediaError, match=message):
        check_source_size(*size)
