"""The dense MLP: `down(silu(gate x) * up x)`."""

from __future__ import annotations

import torch
from torch.nn import functional

from model.layers.build import Build
from model.layers.module import StepModule
from model.layers.step import Step


class Mlp(StepModule):
    """Gate and up are one projection, gate first."""

    def __init__(self, hidden: int, intermediate: int, build: Build) -> None:
        super().__init__()
        self.gate_up = build.linear(hidden, 2 * intermediate)
        self.down = build.linear(intermediate, hidden)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`"""
        linear = step.operators.linear
        return linear(self.down, step.operators.mlp(self, linear(self.gate_up, x, step)), step)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The torch form of what lies between the projections: `[T, 2 intermediate] -> [T, intermediate]`."""
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate).mul_(up)
