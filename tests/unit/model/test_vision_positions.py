"""Three-part positions of prompts, and the rotary tables that both sets of operators make of them, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.decoder import Decoder
from model.families.registry import resolve
from model.layers.rotary import Rotary
from model.vision.positions import position_shift, rotary_positions
from tests.support.batches import Ranks, relative_error
from tests.support.checkpoints import read_config
from tests.support.vision_prompts import (
    Picture,
    Video,
    VisionPrompt,
    encode,
    hf_model,
    hf_vision_logits,
    vision_logits,
    vision_prompt,
)
from tests.unit.model.test_fused_operators import load_fused

Folders = Callable[[str], Path]
PROMPTS: list[tuple[int | Picture | Video, ...]] = [
    (5,),
    (Picture(3, 5),),
    (4, Picture(1, 1), 2, Picture(6, 2), Picture(2, 7), 3),
    (2, Video(2, 3, groups=3), Picture(4, 4), 1, Video(5, 1, groups=1), 6),
]


def reference(path: Path, prompt: VisionPrompt) -> tuple[np.ndarray, int]:
    """transformers' `[3, rows]` and what it adds to the places behind the prompt."""
    model: Any = hf_model(path).get_submodule("model")
    positions, shift = model.get_rope_index(
        torch.tensor([prompt.tokens]),
        torch.tensor([prompt.kinds]),
        image_grid_thw=prompt.image_sizes,
        video_grid_thw=prompt.video_sizes,
    )
    return positions[:, 0].numpy(), int(shift)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5_moe"])
@pytest.mark.parametrize("parts", PROMPTS)
def test_positions(vision_folder: Folders, name: str, parts: tuple[int | Picture | Video, ...]) -> None:
    prompt = vision_prompt(*parts)
    expected, shift = reference(vision_folder(name), prompt)
    assert position_shift(prompt.grids) == shift
    rows = len(prompt.tokens)
    got = rotary_positions(prompt.grids, 0, rows)
    assert got.dtype == np.int32
    assert got.tolist() == expected.tolist()
    for start in range(0, rows, 3):
        assert rotary_positions(prompt.grids, start, min(rows, start + 5)).tolist() == expected[:, start : start + 5].tolist()
    assert rotary_positions(prompt.grids, rows, rows + 2).tolist() == [[rows + shift, rows + shift + 1]] * 3


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_rotary_tables(vision_folder: Folders, name: str) -> None:
    """Each frequency follows its own part, in the torch form and in the kernel's."""
    from kernels.rotary_triton import rotary_cos_sin

    path = vision_folder(name)
    prompt = vision_prompt(*PROMPTS[3])
    positions = torch.from_numpy(rotary_positions(prompt.grids, 0, len(prompt.tokens)))
    embedding: Any = hf_model(path).get_submodule("model.language_model.rotary_emb")
    cos, sin = (table[0] for table in embedding(torch.empty(0), positions[:, None].long()))
    rotary = Rotary(resolve(read_config(path)).rope)
    half = cos.shape[1] // 2
    ours = rotary.tables(positions, torch.float32)
    torch.testing.assert_close(ours[0][:, 0], cos, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours[1][:, 0, half:], sin[:, half:], rtol=0, atol=1e-5)
    frequencies, scale, part = rotary.frequencies(torch.device("cpu"))
    for table, right in zip(rotary_cos_sin(positions, frequencies, scale, part), (cos, sin), strict=True):
        torch.testing.assert_close(table, right[:, :half], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_kernels_give_the_logits_of_the_reference(vision_folder: Folders, name: str) -> None:
    """Three-part positions, inserted rows and deepstack features through the fused operators, in Triton's interpreter."""
    path = vision_folder(name)
    ranks = Ranks(path, load=load_fused)
    model: Decoder = ranks.models[0]
    assert model.tower is not None
    prompt = vision_prompt(2, Picture(3, 2), 1)
    then = [7]
    got = vision_logits(ranks, 0, prompt, encode(ranks, prompt), chunk=6, then=then)
    assert relative_error(got, hf_vision_logits(path, prompt, model.tower.config, then)) < 1e-4
