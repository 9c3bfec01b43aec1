"""Matrices of a layer, and what one loop adds to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional


class Projection(nn.Module):
    """`[..., in] -> [..., out]`, without bias. The weight is `(out, in)`; `model.trellis.initial` gives it values."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: torch.Tensor, adapter: Lora | None = None) -> torch.Tensor:
        """`W x`, or `W x + B (A x)`."""
        out = functional.linear(x, self.weight)
        return out if adapter is None else out + adapter(x)


class Lora(nn.Module):
    """A low-rank difference `B (A x)` at scale one (arXiv 2106.09685): A `(rank, in)`, B `(out, rank)`."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, inputs))
        self.B = nn.Parameter(torch.empty(outputs, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in] -> [..., out]`"""
        return functional.linear(functional.linear(x, self.A), self.B)


class Tuning(NamedTuple):
    """What one loop changes in one layer: factors of both norms' gains, and adapters of the sites q, up and down."""

    gain1: torch.Tensor | None = None
    gain2: torch.Tensor | None = None
    q: Lora | None = None
    up: Lora | None = None
    down: Lora | None = None


NEUTRAL = Tuning()
"""Layers outside the core, and every layer where the specialisation is switched off."""
