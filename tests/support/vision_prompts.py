"""Prompts with images and videos: tokens, grids, pixels, transformers' logits for them, and forwards in chunks through ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from model.vision.config import VisionConfig
from model.vision.patches import ImagePixels, patch_values
from model.vision.positions import rotary_positions
from protocol.commands import VisionGrid
from tests.support.batches import Part, Ranks
from tests.support.checkpoints import read_config
from tests.support.vision_checkpoints import DEFAULT_TOKENS, FRAMES, MERGE, UNIT, Tokens, pixels


@dataclass(frozen=True)
class Picture:
    """An image of `height x width` rows of the prompt."""

    height: int
    width: int
    seed: int = 0


@dataclass(frozen=True)
class Video:
    """`groups` groups of frames of `height x width` rows each, with a token of text before each."""

    height: int
    width: int
    groups: int
    seed: int = 0


@dataclass
class VisionPrompt:
    """`images[n]` has the rows of `grids[n]`; `kinds` are transformers' token types (0 text, 1 image, 2 video)."""

    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    grids: list[VisionGrid] = field(default_factory=list)
    images: list[ImagePixels] = field(default_factory=list)
    items: list[Picture | Video] = field(default_factory=list)

    @property
    def image_sizes(self) -> torch.Tensor | None:
        """transformers' `image_grid_thw`."""
        return _sizes([(1, item.height, item.width) for item in self.items if isinstance(item, Picture)])

    @property
    def video_sizes(self) -> torch.Tensor | None:
        """transformers' `video_grid_thw`."""
        return _sizes([(item.groups, item.height, item.width) for item in self.items if isinstance(item, Video)])


def _sizes(sizes: list[tuple[int, int, int]]) -> torch.Tensor | None:
    return torch.tensor([(t, MERGE * h, MERGE * w) for t, h, w in sizes]) if sizes else None


def vision_prompt(*parts: int | Picture | Video, seed: int = 0, tokens: Tokens = DEFAULT_TOKENS) -> VisionPrompt:
    """A number stands for that many random tokens of text; images and groups of frames stand between start and end tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompt = VisionPrompt()

    def text(count: int) -> list[int]:
        return torch.randint(3, min(tokens.image, tokens.video), (count,), generator=generator).tolist()

    def add(ids: list[int], kind: int = 0) -> None:
        prompt.tokens += ids
        prompt.kinds += [kind] * len(ids)

    def group(item: Picture | Video, values: torch.Tensor, token: int, kind: int) -> None:
        add([tokens.start])
        prompt.grids.append(VisionGrid(start=len(prompt.tokens), height=item.height, width=item.width))
        prompt.images.append(ImagePixels(frames=len(values), height=item.height, width=item.width, pixels=values))
        add([token] * (item.height * item.width), kind)
        add([tokens.end])

    for part in parts:
        if isinstance(part, int):
            add(text(part))
        elif isinstance(part, Picture):
            prompt.items.append(part)
            group(part, pixels(part.height * UNIT, part.width * UNIT, seed=part.seed), tokens.image, 1)
        else:
            prompt.items.append(part)
            frames = pixels(part.height * UNIT, part.width * UNIT, FRAMES * part.groups, seed=part.seed)
            for values in frames.split(FRAMES):
                add(text(1))
                group(part, values, tokens.video, 2)
    return prompt


@cache
def hf_model(path: Path) -> nn.Module:
    """transformers' model of a folder, in float32."""
    architecture = read_config(path)["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.set_experts_implementation("eager")
    return model.eval()


def hf_vision_logits(path: Path, prompt: VisionPrompt, config: VisionConfig, then: list[int] | None = None) -> torch.Tensor:
    """transformers' logits `[rows, vocab]` for a prompt and the tokens `then` after it, given the values of our patches."""
    ids = prompt.tokens + (then or [])
    inputs: dict[str, Any] = {}
    for kind, name, sizes in ((1, "pixel_values", "image_grid_thw"), (2, "pixel_values_videos", "video_grid_thw")):
        grid = prompt.image_sizes if kind == 1 else prompt.video_sizes
        if grid is not None:
            chosen = [image for image in prompt.images if (image.frames == 1) == (kind == 1)]
            inputs |= {name: torch.cat([patch_values(image.pixels[None], config) for image in chosen]), sizes: grid}
    with torch.no_grad():
        types = torch.tensor([prompt.kinds + [0] * (len(ids) - len(prompt.kinds))])
        logits = hf_model(path)(input_ids=torch.tensor([ids]), mm_token_type_ids=types, use_cache=False, **inputs).logits
    return logits[0].float()


def encode(ranks: Ranks, prompt: VisionPrompt) -> list[torch.Tensor]:
    """The rows of the prompt's images, by the tower of rank 0."""
    tower = ranks.models[0].tower
    assert tower is not None
    if not prompt.images:
        return []
    with torch.inference_mode():
        encoding = tower.begin(prompt.images)
        tower.advance(encoding, encoding.remaining_layers)
        return tower.rows(encoding)


def forward_options(prompt: VisionPrompt, rows: list[torch.Tensor], start: int, stop: int) -> dict[str, Any]:
    """`positions` and `inserted` of a batch whose only span is the rows `start .. stop - 1` of a prompt."""
    places: list[int] = []
    values: list[torch.Tensor] = []
    for grid, image in zip(prompt.grids, rows, strict=True):
        low, high = max(start, grid.start), min(stop, grid.start + grid.height * grid.width)
        if low < high:
            places += range(low - start, high - start)
            values.append(image[low - grid.start : high - grid.start])
    options: dict[str, Any] = {"positions": rotary_positions(prompt.grids, start, stop)}
    return options | ({"inserted": (places, torch.cat(values))} if values else {})


def vision_logits(
    ranks: Ranks, slot: int, prompt: VisionPrompt, rows: list[torch.Tensor], chunk: int | None = None, then: list[int] | None = None
) -> torch.Tensor:
    """Logits of all rows of a prompt fed in chunks, and of the tokens `then`, fed one by one."""
    ids = prompt.tokens + (then or [])
    borders = [*range(0, len(prompt.tokens), chunk or len(prompt.tokens)), *range(len(prompt.tokens), len(ids) + 1)]
    out = []
    for start, stop in pairwise(borders):
        outputs = ranks.run(ranks.batch([Part(slot, ids[start:stop])], **forward_options(prompt, rows, start, stop)))
        assert outputs[0].logits is not None
        out.append(outputs[0].logits)
    return torch.cat(out)
