"""Vision towers against transformers, in float32: sizes, frame groups, slices of layers, costs and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model.errors import BatchError
from model.layers.build import Build
from model.vision import tower as tower_module
from model.vision.config import VisionConfig
from model.vision.patches import ImagePixels, patch_values
from model.vision.scratch import tower_scratch
from model.vision.tower import VisionTower
from tests.support.allocations import peak_bytes
from tests.support.batches import Ranks, relative_error
from tests.support.vision_checkpoints import FRAMES, MERGE, UNIT, VARIANTS, pixels
from tests.support.vision_prompts import hf_model

Folders = Callable[[str], Path]
SIZES = ((2, 3, 1), (1, 1, 1), (5, 2, 1), (3, 2, FRAMES), (2, 3, FRAMES), (6, 1, 1), (2, 3, 1), (9, 8, 1))
"""Height and width in rows of the prompt, and frames: several share a size, or a number of patches."""


def image(height: int, width: int, frames: int = 1, seed: int = 0) -> ImagePixels:
    return ImagePixels(frames=frames, height=height, width=width, pixels=pixels(height * UNIT, width * UNIT, frames, seed))


def run(tower: VisionTower, images: Sequence[ImagePixels], layers: int | None = None) -> list[torch.Tensor]:
    with torch.inference_mode():
        encoding = tower.begin(images)
        while not tower.advance(encoding, layers or encoding.depth):
            assert encoding.remaining_layers
        return tower.rows(encoding)


def reference(path: Path, images: Sequence[ImagePixels], config: VisionConfig) -> list[torch.Tensor]:
    """transformers' rows, its deepstack features beside them, from the values of our patches."""
    visual: Any = hf_model(path).get_submodule("model.visual")
    with torch.no_grad():
        values = torch.cat([patch_values(each.pixels[None], config) for each in images])
        out = visual(values, grid_thw=torch.tensor([[1, MERGE * each.height, MERGE * each.width] for each in images]))
    rows = torch.cat([out.pooler_output, *getattr(out, "deepstack_features", [])], 1)
    return list(rows.split([each.height * each.width for each in images]))


def tower_of(path: Path) -> VisionTower:
    tower = Ranks(path).models[0].tower
    assert tower is not None
    return tower


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_of_many_sizes_at_once(vision_folder: Folders, name: str) -> None:
    tower = tower_of(vision_folder(name))
    images = [image(*size, seed=seed) for seed, size in enumerate(SIZES)]
    expected = reference(vision_folder(name), images, tower.config)
    for layers in (1, 2, None):
        got = run(tower, images, layers)
        for number, (rows, right) in enumerate(zip(got, expected, strict=True)):
            assert rows.shape[1] == tower.config.row_width
            assert relative_error(rows, right) < 1e-5, (layers, SIZES[number])
    assert len({rows.untyped_storage().data_ptr() for rows in got}) == len(images)


def test_an_image_does_not_see_its_neighbours(vision_folder: Folders) -> None:
    tower = tower_of(vision_folder("qwen3_vl"))
    images = [image(*size, seed=seed) for seed, size in enumerate(SIZES)]
    for together, each in zip(run(tower, images), images, strict=True):
        assert relative_error(run(tower, [each])[0], together) < 1e-5


def test_tiles(vision_folder: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows do not depend on how many patches are worked on at once."""
    tower = tower_of(vision_folder("qwen3_vl"))
    images = [image(*size, seed=seed) for seed, size in enumerate(SIZES)]
    expected = run(tower, images)
    monkeypatch.setattr(tower_module, "TILE", 20)
    for rows, right in zip(run(tower, images), expected, strict=True):
        assert relative_error(rows, right) < 1e-5


def test_rows_only_of_an_encoding_that_is_done(vision_folder: Folders) -> None:
    tower = tower_of(vision_folder("qwen3_5"))
    with torch.inference_mode():
        encoding = tower.begin([image(1, 2)])
        assert (tower.advance(encoding, 2), encoding.remaining_layers) == (False, 1)
        with pytest.raises(ValueError, match="1 blocks of 3"):
            tower.rows(encoding)
        assert tower.advance(encoding, 5)
        assert [tuple(rows.shape) for rows in tower.rows(encoding)] == [(2, 40)]


@pytest.mark.parametrize(
    "wrong",
    [
        replace(image(2, 3), height=3),
        replace(image(2, 3), pixels=pixels(2 * UNIT, 3 * UNIT).float()),
        replace(image(2, 3), frames=2),
        ImagePixels(frames=3, height=1, width=1, pixels=pixels(UNIT, UNIT, 3)),
        ImagePixels(frames=1, height=0, width=1, pixels=pixels(0, UNIT)),
    ],
)
def test_pixels_that_do_not_fit(vision_folder: Folders, wrong: ImagePixels) -> None:
    with pytest.raises(BatchError):
        tower_of(vision_folder("qwen3_5")).begin([image(1, 1), wrong])


@pytest.mark.parametrize("sizes", [SIZES, SIZES[3:5], ((11, 4, 1),)])
def test_cost_of_a_layer(vision_folder: Folders, sizes: Sequence[tuple[int, int, int]]) -> None:
    """What torch counts of one block's products."""
    tower = tower_of(vision_folder("qwen3_5"))
    images = [image(*size) for size in sizes]
    with torch.no_grad():
        encoding = tower.begin(images)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            tower.advance(encoding, 1)
    assert tower.layer_cost(images) == counter.get_total_flops()


@pytest.mark.parametrize("deepstack", [(), (0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [((24, 24),), ((4, 150),), ((8, 8),) * 9, ((3, 3), (20, 20))])
def test_memory_of_an_encoding(
    monkeypatch: pytest.MonkeyPatch, sizes: Sequence[tuple[int, int]], dtype: torch.dtype, deepstack: tuple[int, ...]
) -> None:
    """The plan's bound holds and is not far from what an encoding takes; with tiles smaller than the images too."""
    config = VisionConfig(
        depth=2,
        hidden=96,
        heads=4,
        intermediate=256,
        approximate="tanh",
        patch=8,
        merge=2,
        frames=2,
        side=12,
        theta=10_000.0,
        out_hidden=128,
        deepstack=deepstack,
        image_token=0,
        video_token=1,
    )
    torch.manual_seed(0)
    tower = VisionTower(config, Build(dtype, torch.device("cpu"), row_major=False))
    for parameter in tower.parameters():
        parameter.normal_(std=0.05)
    images = [
        ImagePixels(frames=2, height=h, width=w, pixels=torch.zeros(2, 16 * h, 16 * w, 3, dtype=torch.uint8)) for h, w in sizes
    ]
    patches = sum(4 * height * width for height, width in sizes)
    for tile in (8192, 512):
        monkeypatch.setattr("model.vision.tower.TILE", tile)
        monkeypatch.setattr("model.vision.scratch.TILE", tile)
        planned = tower_scratch(config, patches, dtype.itemsize)
        taken = peak_bytes(lambda: run(tower, images))
        assert 0.3 * planned < taken < planned + 100_000, (tile, taken / planned)
