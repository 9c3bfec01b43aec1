"""Values of patches against transformers' processor for images, and against the layout's definition for groups of frames."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from model.families.registry import resolve
from model.vision.config import PixelScale, VisionConfig
from model.vision.patches import patch_values
from tests.unit.model.test_vision_config import VL_MOE

UNEVEN = PixelScale(rescale=1 / 255, mean=(0.48, 0.45, 0.4), std=(0.26, 0.27, 0.3))


def tower_config(**sizes: Any) -> VisionConfig:
    config = resolve(VL_MOE).vision
    assert config is not None
    return replace(config, **sizes)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 3), (5, 2)])
@pytest.mark.parametrize(("patch", "merge", "frames"), [(16, 2, 2), (4, 3, 1), (14, 1, 3)])
def test_images(height: int, width: int, patch: int, merge: int, frames: int) -> None:
    """The processor is given sizes that it keeps."""
    config = tower_config(patch=patch, merge=merge, frames=frames, scale=UNEVEN)
    unit = patch * merge
    images = torch.randint(0, 256, (2, 1, height * unit, width * unit, 3), dtype=torch.uint8)
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=frames,
        image_mean=list(UNEVEN.mean),
        image_std=list(UNEVEN.std),
        size={"shortest_edge": 1, "longest_edge": 10**8},
    )
    expected = processor(images=[image[0].numpy() for image in images], return_tensors="pt")
    assert expected["image_grid_thw"].tolist() == [[1, height * merge, width * merge]] * 2
    values = patch_values(images, config)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected["pixel_values"], rtol=1e-5, atol=1e-6)


def test_frames_of_a_group() -> None:
    """Every value stands where the layout says: merged row, place in it, colour, frame, y, x."""
    config = tower_config(patch=2, merge=2, frames=2, scale=PixelScale(rescale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3))
    pixels = torch.arange(2 * 8 * 12 * 3).remainder(251).to(torch.uint8).view(1, 2, 8, 12, 3)
    values = patch_values(pixels, config).view(2, 3, 2, 2, 3, 2, 2, 2)
    for row, column, down, right in torch.cartesian_prod(*(torch.arange(size) for size in (2, 3, 2, 2))).tolist():
        y, x = 4 * row + 2 * down, 4 * column + 2 * right
        block = pixels[0, :, y : y + 2, x : x + 2].permute(3, 0, 1, 2)
        assert torch.equal(values[row, column, down, right], block.float())
