"""The dense MLP: `down(silu(gate x) * up x)`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from model.layers.build import Build


class Mlp(nn.Module):
    """Gate and up are one projection, gate first."""

    def __init__(self, hidden: int, intermediate: int, build: Build) -> None:
        super().__init__()
        self.gate_up = build.linear(hidden, 2 * intermediate)
        self.down = build.linear(intermediate, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`"""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(gate).mul_(up))
