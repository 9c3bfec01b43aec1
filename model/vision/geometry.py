"""Where patches lie in an image: their learned positions and their rotary tables, in the order of `patch_values`."""

from __future__ import annotations

import torch

from kernels.rotary import rotary_tables
from model.vision.config import VisionConfig


def interpolated_positions(table: torch.Tensor, height: int, width: int, config: VisionConfig) -> torch.Tensor:
    """`[patches, hidden]` in the table's dtype: `table [side * side, hidden]` stretched to an image of `height x width` rows.

    Bilinear, the table's corners on the image's. Each axis in its turn is a product with the weights of the table's lines.
    """
    side, m = config.side, config.merge
    rows, columns = (_line_weights(size * m, side, table.device) for size in (height, width))
    lines = table.float().view(side, side, -1)
    # The shorter axis first: what lies between is as long as it.
    if height <= width:
        stretched = columns @ (rows @ lines.flatten(1)).view(height * m, side, -1)
    else:
        stretched = (rows @ (columns @ lines).flatten(1)).view(height * m, width * m, -1)
    return _merge_order(stretched, height, width, m).to(table.dtype)


def rotary_of_grid(height: int, width: int, config: VisionConfig, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 cosines and signed sines `[patches, 1, head_dim]` of an image of `height x width` rows."""
    m, spatial = config.merge, config.head_dim // 2
    inv_freq = 1.0 / (config.theta ** (torch.arange(0, spatial, 2, dtype=torch.float32, device=device) / spatial))
    y, x = (torch.arange(size * m, device=device) for size in (height, width))
    grid = torch.stack(torch.meshgrid(y, x, indexing="ij"), -1)
    places = _merge_order(grid, height, width, m).repeat_interleave(len(inv_freq), 1)
    return rotary_tables(places, inv_freq.repeat(2), 1.0, torch.float32)


def _line_weights(size: int, side: int, device: torch.device) -> torch.Tensor:
    """`[size, side]`: how much of each of `side` lines goes into each of `size`. A hat around the place between the lines."""
    places = torch.arange(size, dtype=torch.float32, device=device) * (side - 1) / max(size - 1, 1)
    return (1 - (places.unsqueeze(1) - torch.arange(side, device=device)).abs()).clamp_(min=0)


def _merge_order(grid: torch.Tensor, height: int, width: int, merge: int) -> torch.Tensor:
    """`[height * merge, width * merge, n] -> [patches, n]`, the patches of each row of the prompt together."""
    return grid.view(height, merge, width, merge, -1).transpose(1, 2).reshape(height * width * merge**2, -1)
