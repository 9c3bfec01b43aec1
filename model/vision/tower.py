"""The vision tower of Qwen3-VL and Qwen3.5: patches of pixels -> rows of a prompt.

A pre-norm transformer over the patches of an image, or of a group of a video's frames, which attend to each other and to no other
image. Its parts: linear patch embedding, learned positions interpolated to the image's grid, axial rotary embedding (half of the
frequencies follow the patch's row, half its column), and a merger that joins neighbouring patches to a row of the text's width.
Blocks that the configuration names give deepstack features (arXiv 2406.04334) through mergers of their own.

An encoding runs some blocks at a time, so that other work fits between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import nn
from torch.nn import functional

from kernels.rotary import rotate
from model.layers.build import Build
from model.vision.config import VisionConfig
from model.vision.geometry import interpolated_positions, rotary_of_grid
from model.vision.patches import ImagePixels, Sized, check_images, patch_count, patch_values
from model.vision.tiles import TILE

EPS = 1e-6
"""Of all norms of a tower."""


@dataclass(kw_only=True, slots=True)
class Encoding:
    """Images on their way through a tower, ordered by size. `x [patches, hidden]` is the residual."""

    images: tuple[tuple[int, int], ...]
    """(number in the caller's order, rows of the prompt) of each image, in the order of `x`."""
    groups: tuple[tuple[int, int], ...]
    """(images, patches of each) of equally long ones, in the order of `x`."""
    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    """`[patches, 1, head_dim]` float32."""
    depth: int
    done: int = 0
    """Blocks that have run."""
    features: list[torch.Tensor] = field(default_factory=list)
    """Deepstack features so far, `[rows, out_hidden]` each."""

    @property
    def remaining_layers(self) -> int:
        """Blocks that have not run."""
        return self.depth - self.done


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias over the last dimension."""

    def __init__(self, size: int, build: Build) -> None:
        super().__init__()
        self.weight = build.vector(size)
        self.bias = build.vector(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., size]` -> the same."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, EPS)


class Merger(nn.Module):
    """Joins `merge` x `merge` neighbouring patches to a row. `joined_norm`: the norm is over the joined row, not over patches."""

    def __init__(self, config: VisionConfig, build: Build, *, joined_norm: bool) -> None:
        super().__init__()
        self._joined = config.merged
        self._joined_norm = joined_norm
        self.norm = LayerNorm(config.merged if joined_norm else config.hidden, build)
        self.up = build.linear(config.merged, config.merged, bias=True)
        self.down = build.linear(config.merged, config.out_hidden, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[patches, hidden] -> [rows, out_hidden]`"""
        out = x.new_empty(x.numel() // self._joined, self.down.weight.shape[0])
        tile = max(1, TILE * x.shape[1] // self._joined)
        for rows, target in zip(x.view(-1, self._joined).split(tile), out.split(tile), strict=True):
            parts = rows if self._joined_norm else rows.view(-1, x.shape[1])
            target.copy_(self.down(functional.gelu(self.up(self.norm(parts).view(-1, self._joined)))))
        return out


class Block(nn.Module):
    """Attention within each image, then an MLP."""

    def __init__(self, config: VisionConfig, build: Build) -> None:
        super().__init__()
        self._heads, self._head_dim = config.heads, config.head_dim
        self._approximate = config.approximate
        self.norm1 = LayerNorm(config.hidden, build)
        self.norm2 = LayerNorm(config.hidden, build)
        self.qkv = build.linear(config.hidden, 3 * config.hidden, bias=True)
        self.out = build.linear(config.hidden, config.hidden, bias=True)
        self.up = build.linear(config.hidden, config.intermediate, bias=True)
        self.down = build.linear(config.intermediate, config.hidden, bias=True)

    def forward(self, encoding: Encoding) -> None:
        """Add to the encoding's residual, in place."""
        encoding.x += self.out(self._attention(self.qkv(self.norm1(encoding.x)), encoding))
        for rows in encoding.x.split(TILE):
            rows += self.down(functional.gelu(self.up(self.norm2(rows)), approximate=self._approximate))

    def _attention(self, qkv: torch.Tensor, encoding: Encoding) -> torch.Tensor:
        """`[patches, 3 * hidden]`, whose queries and keys are turned in place -> `[patches, hidden]`."""
        heads = qkv.view(qkv.shape[0], 3 * self._heads, self._head_dim)
        tables = zip(heads.split(TILE), encoding.cos.split(TILE), encoding.sin.split(TILE), strict=True)
        for rows, cos, sin in tables:
            for start in (0, self._heads):
                turned = rows[:, start : start + self._heads]
                turned.copy_(rotate(turned.float(), cos, sin))
        out = torch.empty_like(encoding.x)
        start = 0
        for images, patches in encoding.groups:
            stop = start + images * patches
            parts = heads[start:stop].view(images, patches, 3, self._heads, self._head_dim).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
            out[start:stop].view(images, patches, self._heads, self._head_dim).copy_(attended.transpose(1, 2))
            start = stop
        return out


class VisionTower(nn.Module):
    """The tower, on the rank that encodes. Parameters need no gradient; run it in `torch.inference_mode`."""

    def __init__(self, config: VisionConfig, build: Build) -> None:
        super().__init__()
        self.config = config
        # The disk's layout of a convolution, whose kernel is as large as its step: a linear layer over the values of a patch.
        self.patch_weight = build.vector(config.hidden, 3, config.frames, config.patch, config.patch)
        self.patch_bias = build.vector(config.hidden)
        self.positions = build.vector(config.side**2, config.hidden)
        self.blocks = nn.ModuleList(Block(config, build) for _ in range(config.depth))
        self.merger = Merger(config, build, joined_norm=False)
        self.deepstack = nn.ModuleList(Merger(config, build, joined_norm=True) for _ in config.deepstack)

    def begin(self, images: Sequence[ImagePixels]) -> Encoding:
        """Embed the patches of at least one image. Raises BatchError for pixels that the tower does not take."""
        check_images(images, self.config)
        # Equal sizes become neighbours: they share tables, and go through embedding and attention together.
        order = sorted(range(len(images)), key=lambda n: (patch_count(images[n], self.config), images[n].height, images[n].frames))
        groups = [(len(list(run)), n) for n, run in groupby(patch_count(images[number], self.config) for number in order)]
        patches = sum(count * n for count, n in groups)
        device = self.positions.device
        x = torch.empty(patches, self.config.hidden, dtype=self.positions.dtype, device=device)
        cos, sin = torch.empty(2, patches, 1, self.config.head_dim, device=device)
        start = 0
        for (height, width, _), run in groupby(order, key=lambda n: (images[n].height, images[n].width, images[n].frames)):
            pixels = torch.stack([images[number].pixels for number in run]).to(device)
            stop = start + len(pixels) * height * width * self.config.merge**2
            self._embed(pixels, x[start:stop])
            tables = rotary_of_grid(height, width, self.config, device)
            for target, table in zip((cos, sin), tables, strict=True):
                target[start:stop].view(len(pixels), *table.shape).copy_(table)
            start = stop
        sizes = tuple((number, images[number].height * images[number].width) for number in order)
        return Encoding(images=sizes, groups=tuple(groups), x=x, cos=cos, sin=sin, depth=self.config.depth)

    def advance(self, encoding: Encoding, layers: int) -> bool:
        """Run at most `layers` of the remaining blocks; True when none remains."""
        for number in range(encoding.done, min(encoding.done + layers, encoding.depth)):
            self.blocks[number](encoding)
            if number in self.config.deepstack:
                encoding.features.append(self.deepstack[self.config.deepstack.index(number)](encoding.x))
            encoding.done = number + 1
        return encoding.remaining_layers == 0

    def rows(self, encoding: Encoding) -> list[torch.Tensor]:
        """`[rows, row_width]` of each image in the order of `begin`, none sharing memory, of an encoding that is done."""
        if encoding.remaining_layers:
            raise ValueError(f"{encoding.remaining_layers} blocks of {encoding.depth} have not run")
        sizes = [rows for _, rows in encoding.images]
        parts = [part.split(sizes) for part in (self.merger(encoding.x), *encoding.features)]
        out = {number: torch.cat(row, 1) for (number, _), *row in zip(encoding.images, *parts, strict=True)}
        return [out[number] for number in range(len(out))]

    def layer_cost(self, images: Sequence[Sized]) -> float:
        """Floating point operations of one block over these images."""
        hidden, counts = self.config.hidden, [patch_count(image, self.config) for image in images]
        linear = 2.0 * hidden * (4 * hidden + 2 * self.config.intermediate)
        return linear * sum(counts) + 4.0 * hidden * sum(n * n for n in counts)

    def _embed(self, pixels: torch.Tensor, out: torch.Tensor) -> None:
        """Images of one size, uint8 `[images, frames, H, W, 3]` -> their patches' embeddings with positions, into `out`."""
        weight, unit = self.patch_weight.flatten(1), self.config.patch * self.config.merge
        positions = interpolated_positions(self.positions, pixels.shape[2] // unit, pixels.shape[3] // unit, self.config)
        at_once = max(1, TILE // len(positions))
        for images, rows in zip(pixels.split(at_once), out.split(at_once * len(positions)), strict=True):
            embedded = functional.linear(patch_values(images, self.config).to(weight.dtype), weight, self.patch_bias)
            torch.add(embedded.view(len(images), *positions.shape), positions, out=rows.view(len(images), *positions.shape))
