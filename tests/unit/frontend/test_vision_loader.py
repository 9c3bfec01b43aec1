"""The loader believes no decoder whose pixels are not of the size that it says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.text.tokenizer import Tokenizer
from ep_runtime.frontend.vision.jobs import Decoded, Grid, Job
from ep_runtime.frontend.vision.loader import MediaLoader, MediaPart
from ep_runtime.frontend.vision.memory import ImageMemory
from ep_runtime.frontend.vision.settings import load_vision
from tests.support.vision_text_model import UNIT, write_vision_text_model

RIGHT = 3 * UNIT**2


class Answering:
    """In the place of the decoders: one answer to everything."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    async def decode(self, job: Job, most: int) -> Decoded:
        return Decoded(grids=[self._grid])


def load(folder: Path, grid: Grid) -> list[Decoded]:
    settings = load_vision(write_vision_text_model(folder), Tokenizer.load(folder), max_image_pixels=2**22, max_video_pixels=2**22)
    assert settings is not None
    loader = MediaLoader(settings, cast(Any, None), cast(Any, Answering(grid)), folder=None, most=1000)

    async def main() -> list[Decoded]:
        with ImageMemory(2**20, lambda: 0).holding() as hold:
            return await loader.load([MediaPart("image", "data:image/png;base64,AAAA", "messages.0.content.0")], hold)

    return asyncio.run(main())


def test_pixels_of_the_size_that_is_said_are_taken(tmp_path: Path) -> None:
    (decoded,) = load(tmp_path, Grid(height=2, width=3, frames=1, pixels=bytes(6 * RIGHT)))
    assert decoded.grids[0].rows == 6


@pytest.mark.parametrize(
    ("height", "width", "frames", "size"),
    [(60_000, 60_000, 1, RIGHT), (1, 1, 1, RIGHT - 1), (1, 1, 2, RIGHT), (0, 5, 1, 0), (-1, -1, 1, RIGHT), (1, 1, 1, 0)],
)
def test_a_decoder_that_says_another_size_than_it_gives_costs_its_own_request(
    tmp_path: Path, height: int, width: int, frames: int, size: int
) -> None:
    with pytest.raises(ApiError, match="pixels of another size") as error:
        load(tmp_path, Grid(height=height, width=width, frames=frames, pixels=bytes(size)))
    assert (error.value.status_code, error.value.code) == (400, "invalid_image")
