"""What a request may show: refused by name at submission; how an image is named by its contents; what images take of memory."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ep_runtime.bench.configs import write_vision_config
from ep_runtime.config import Facts, RuntimeConfig, resolve
from ep_runtime.engine.footprint import memory_needs
from ep_runtime.engine.vision.checks import images_fault
from ep_runtime.engine.vision.cost import chunk_cost, slice_cost
from ep_runtime.engine.vision.inputs import vision_input
from model.loader import prepare_model
from model.memory import DeviceMemory, plan_memory
from model.parallel import Parallel
from model.spec import VisionSpec
from model.vision.scratch import tower_scratch
from model.vision.tower import VisionTower
from protocol.messages import SamplingParams, Submit, VisionInput
from protocol.vision import pixel_digest
from tests.support.vision_checkpoints import make_vision_checkpoint

SPEC = VisionSpec(placeholders=(90, 91), patch=2, merge=2, frames=2, row_width=3)


def image(start: int, height: int = 2, width: int = 1, frames: int = 1, value: int = 0, **changes: Any) -> VisionInput:
    made = vision_input(start, np.full((frames, 4 * height, 4 * width, 3), value, np.uint8), SPEC)
    return msgspec.structs.replace(made, **changes)


def fault(prompt: list[int], *images: VisionInput, spec: VisionSpec | None = SPEC) -> str | None:
    return images_fault(Submit("r", "r", prompt, SamplingParams(seed=0, max_tokens=1), images=list(images)), spec)


def test_what_fits_passes() -> None:
    assert fault([1, 2]) is None
    assert fault([1, 2], spec=None) is None
    assert fault([1, 90, 90, 2], image(1)) is None
    assert fault([90, 90, 91, 91, 5], image(0), image(2, 1, 2, frames=2)) is None
    assert fault([90, 90], spec=None) is None, "a token like any other where there is no vision"


@pytest.mark.parametrize(
    ("prompt", "images", "text"),
    [
        ([1, 90, 90], [], "prompt has 2 placeholder tokens of images, and its images 0 rows: an image is missing"),
        ([1, 90, 90, 91], [image(1)], "prompt has 3 placeholder tokens of images, and its images 2 rows"),
        ([1, 90, 3], [image(1)], "images: image 0 at positions 1 to 2 does not stand on placeholder tokens alone"),
        ([1, 90], [image(1)], "images: image 0 reaches to position 3, the prompt has 2 tokens"),
        ([90, 90, 90], [image(0), image(1)], "images: image 1 starts at 1, the one before it ends at 2"),
        ([90, 90, 5, 90, 90], [image(3), image(0)], "images: image 1 starts at 0, the one before it ends at 5"),
        ([90, 90], [image(0, frames=2, pixels=b"")], "image 0 of 2 x 1 rows has 0 bytes of pixels, not 192"),
        (
            [90, 90],
            [msgspec.structs.replace(image(0), frames=3)],
            "images: image 0 has 3 frames; an image has 1, a group of a video's frames 2",
        ),
        ([90, 90], [msgspec.structs.replace(image(0), height=1)], "images: image 0 of 1 x 1 rows has 96 bytes of pixels, not 48"),
        ([90, 90], [image(0, digest=b"short")], "images: image 0 has a digest of 5 bytes, not 32"),
    ],
)
def test_refused_by_name(prompt: list[int], images: list[VisionInput], text: str) -> None:
    assert text in (fault(prompt, *images) or "")


def test_a_model_without_vision_takes_no_image() -> None:
    assert fault([90, 90], image(0), spec=None) == "images: this model takes none"


# Contents


def test_contents_are_named_by_shape_and_pixels() -> None:
    pixels = np.arange(4 * 8 * 3, dtype=np.uint8).reshape(1, 4, 8, 3)
    shape = b"\x01\0\0\0\x04\0\0\0\x08\0\0\0"
    assert vision_input(3, pixels, SPEC).digest == blake2b(shape + pixels.tobytes(), digest_size=32).digest()
    assert pixel_digest((1, 4, 8), pixels.tobytes()) != pixel_digest((1, 8, 4), pixels.tobytes())
    made = vision_input(3, pixels.transpose(0, 2, 1, 3), SPEC)
    assert (made.start, made.height, made.width, made.frames, made.rows) == (3, 2, 1, 1, 2)
    assert made.pixels == pixels.transpose(0, 2, 1, 3).tobytes()


@pytest.mark.parametrize("shape", [(1, 4, 6, 3), (1, 0, 4, 3), (3, 4, 4, 3), (1, 4, 4, 4), (4, 4, 3)])
def test_other_pixels_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="pixels"):
        vision_input(0, np.zeros(shape, np.uint8), SPEC)
    with pytest.raises(ValueError, match="pixels are float64"):
        vision_input(0, np.zeros((1, 4, 4, 3)), SPEC)


# Sizes


def config_of(folder: Path, **settings: Any) -> RuntimeConfig:
    facts = Facts(gpus=0, cores=1)
    return resolve(RuntimeConfig(model=str(folder), max_num_seqs=2, max_num_batched_tokens=8, num_blocks=8, **settings), facts)


def test_images_have_lines_in_the_plan_and_only_the_head_has_a_tower(tmp_path: Path) -> None:
    folder = make_vision_checkpoint("qwen3_vl_moe", tmp_path / "model")
    config = config_of(folder, max_image_tokens=40, image_cache_bytes=100_000)
    row = 40 * 3 * 4
    lines = {}
    for rank in (0, 1):
        prepared = prepare_model(folder, Parallel(rank, 2), dtype=torch.float32, device="cpu")
        needs = memory_needs(config, prepared, torch.float32, max_model_len=64)
        plan = plan_memory(prepared.spec, needs, DeviceMemory("cpu", 10**10, 0), 1.0)
        lines[rank] = [line for line in plan.lines if "image" in line[0] or "tower" in line[0]]
        tower = prepared.config.vision
        assert tower is not None
    assert lines[1] == [(f"image rows, 40 of {row} B", 40 * row)]
    # 160 patches of two frames of 4 x 4 pixels.
    assert lines[0] == [
        *lines[1],
        (f"encoded images, {100_000 // row} rows kept and 40 to send", 100_000 + 40 * row),
        ("vision tower, 160 patches at once", tower_scratch(tower, 160, 4) + 160 * 96),
    ]


@pytest.mark.parametrize(("length", "asked", "tokens"), [(64, None, 64), (100_000, None, 16384), (64, 7, 7), (64, 500, 500)])
def test_rows_at_once_follow_from_the_longest_sequence(tmp_path: Path, length: int, asked: int | None, tokens: int) -> None:
    folder = make_vision_checkpoint("qwen3_5_moe", tmp_path / "model")
    prepared = prepare_model(folder, Parallel(0, 1), dtype=torch.float32, device="cpu")
    needs = memory_needs(config_of(folder, max_image_tokens=asked, image_cache_bytes=0), prepared, torch.float32, length)
    assert needs.images[0] == (f"image rows, {tokens} of 160 B", tokens * 160)
    assert needs.images[1][1] == 2 * tokens * 160, "the cache has room for one prompt whatever is asked for"


def test_a_prompt_piece_costs_two_operations_a_weight(tmp_path: Path) -> None:
    """Weights that a row meets, from the shapes of the checkpoint's tensors."""
    folder = make_vision_checkpoint("qwen3_vl_moe", tmp_path / "model")
    prepared = prepare_model(folder, Parallel(0, 1), dtype=torch.float32, device="cpu")
    hidden, heads, kv_heads, head_dim = 40, 6, 2, 16
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    moe = 10 * hidden + 3 * 3 * 24 * hidden
    assert chunk_cost(prepared.config, 8) == 2 * 8 * 3 * (attention + moe)
    assert chunk_cost(prepared.config, 8, ranks=3) == 2 * 8 * 3 * (attention + 10 * hidden + 3 * 24 * hidden)
    assert slice_cost(prepared.config, 8, 1) == chunk_cost(prepared.config, 8) / 2


H200_PROMPT, H200_TOWER, H200_STEP = 346e12, 287e12, 7.0e-3
"""Operations a second of a full piece and of the tower, seconds of a decode step: docs/benchmarks/data/h200-vision-*.json."""


@pytest.mark.parametrize(("side", "other"), [(512, 512), (1024, 1024), (2048, 2048), (4096, 2048)])
@pytest.mark.parametrize(("rows", "gap"), [(2048, 0.0360), (8192, 0.0884)])
def test_a_gap_with_a_slice_is_no_longer_than_that_of_a_full_piece(
    tmp_path: Path, rows: int, gap: float, side: int, other: int
) -> None:
    """Of Qwen3.5-35B-A3B: `gap` is what streams on an H200 see of a piece of so many rows."""
    write_vision_config("qwen3.5-35b-a3b", tmp_path)
    config = prepare_model(tmp_path, Parallel(0, 1), dtype=torch.bfloat16, device="meta", load_format="dummy").config
    tower = SimpleNamespace(config=config.vision)
    seen = SimpleNamespace(height=side // 32, width=other // 32)
    block = VisionTower.layer_cost(tower, [seen])  # type: ignore[arg-type]
    blocks = min(27, max(1, slice_cost(config, rows, 1) // block))
    assert chunk_cost(config, rows) / H200_PROMPT == pytest.approx(gap, rel=0.35), "the estimate is of that size"
    assert blocks * block / H200_TOWER + H200_STEP <= 1.1 * gap
