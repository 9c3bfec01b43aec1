"""Requests with images for an engine, and transformers' judgement of the tokens and log-probabilities that come back."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from ep_runtime.engine.vision.inputs import vision_input
from model.families.registry import resolve
from model.folder import open_folder
from model.spec import VisionSpec
from model.vision.config import VisionConfig
from protocol.commands import VisionGrid
from protocol.messages import VisionInput
from tests.support.greedy import NEAR_TIE
from tests.support.vision_checkpoints import FRAMES, IMAGE, MERGE, PATCH, VIDEO
from tests.support.vision_prompts import VisionPrompt, hf_vision_logits

SPEC = VisionSpec(placeholders=(), patch=PATCH, merge=MERGE, frames=FRAMES, row_width=0)
ALIASES = {IMAGE: 310, VIDEO: 311}
"""In a folder of `with_aliases`, tokens of text whose embeddings are those of the placeholders."""


def inputs_of(prompt: VisionPrompt) -> list[VisionInput]:
    """The images of a prompt as a request has them."""
    pairs = zip(prompt.grids, prompt.images, strict=True)
    return [vision_input(grid.start, image.pixels.numpy(), SPEC) for grid, image in pairs]


def request_of(prompt: VisionPrompt, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Plain data of a request, as `engine_images_cases` take it; `more` are sampling parameters."""
    images = [msgspec.structs.asdict(image) for image in inputs_of(prompt)]
    return {"prompt": prompt.tokens, "images": images, "max_tokens": max_tokens, **more}


def trimmed(prompt: VisionPrompt, *, front: int = 0, back: int = 0) -> VisionPrompt:
    """The prompt without so many tokens of text at its ends, so that an image can be the first or the last of it."""
    stop = len(prompt.tokens) - back
    return replace(
        prompt,
        tokens=prompt.tokens[front:stop],
        kinds=prompt.kinds[front:stop],
        grids=[VisionGrid(grid.start - front, grid.height, grid.width) for grid in prompt.grids],
    )


@cache
def vision_config(folder: Path) -> VisionConfig:
    """The vision part of a folder's configuration."""
    opened = open_folder(folder)
    config = resolve(opened.config, opened.generation, opened.processors).vision
    assert config is not None
    return config


def with_aliases(folder: Path, target: Path) -> Path:
    """A copy of a checkpoint in which the tokens of ALIASES have the placeholders' embeddings."""
    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    for token, alias in ALIASES.items():
        tensors[name][alias] = tensors[name][token]
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def judge_vision(folder: Path, prompt: VisionPrompt, answer: Mapping[str, Any], bias: Mapping[int, float] | None = None) -> None:
    """Raise AssertionError unless every token is transformers' best after what precedes it, near ties apart.

    Log-probabilities, of the prompt too where the answer has them, must be transformers' own. transformers wants an image for each
    placeholder: those that were generated are given to it as their aliases, so the folder is one of `with_aliases`.
    """
    tokens: list[int] = answer["tokens"]
    assert (answer["finish"], answer["terminal_events"]) == ("length", 1), answer["error"]
    fed = [ALIASES.get(token, token) for token in tokens]
    logits = hf_vision_logits(folder, prompt, vision_config(folder), then=fed)
    rows = logits[len(prompt.tokens) - 1 : -1].clone()
    values = logits.log_softmax(-1)
    for token, added in (bias or {}).items():
        rows[:, token] += added
    behind = rows.max(1).values - rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert behind.max() < NEAR_TIE, f"tokens {tokens} are below the best logits by {behind.tolist()}"
    ids = prompt.tokens + tokens
    for given, targets in (("prompt_logprobs", range(1, len(prompt.tokens))), ("logprobs", range(len(prompt.tokens), len(ids)))):
        if answer[given]:
            expected = [values[place - 1, ids[place]].item() for place in targets]
            assert answer[given] == pytest.approx(expected, abs=1e-4), given
