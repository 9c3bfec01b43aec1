"""What every layer needs to create its parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from model.layers.linear import Linear, empty_weight
from model.layers.operators import Operators, TorchOperators


@dataclass(frozen=True, slots=True)
class Build:
    """Where parameters are created, in which dtype, and in which memory layout (see `empty_weight`)."""

    dtype: torch.dtype
    device: torch.device
    row_major: bool
    operators: Operators = field(default_factory=TorchOperators)

    def linear(self, in_features: int, out_features: int, *, bias: bool = False) -> Linear:
        """A linear layer without values."""
        return Linear(in_features, out_features, bias=bias, dtype=self.dtype, device=self.device, row_major=self.row_major)

    def weight(self, *shape: int) -> nn.Parameter:
        """A weight `[..., out, in]` without values."""
        return empty_weight(shape, self.dtype, self.device, row_major=self.row_major)

    def expert_down(self, experts: int, hidden: int, intermediate: int) -> nn.Parameter:
        """Down projections `[experts, hidden, intermediate]`; unless `row_major`, all units of all experts lie below each other."""
        if self.row_major:
            return self.weight(experts, hidden, intermediate)
        memory = torch.empty(experts, intermediate, hidden, dtype=self.dtype, device=self.device)
        return nn.Parameter(memory.mT, requires_grad=False)

    def vector(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """A small parameter in the usual layout, without values."""
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)
