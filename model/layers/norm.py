"""RMSNorm layers."""

from __future__ import annotations

import torch

from kernels.rms_norm import gated_rms_norm, rms_norm, zero_centered_rms_norm
from model.layers.build import Build
from model.layers.module import StepModule


class RMSNorm(StepModule):
    """RMSNorm over the last dimension. `zero_centered` weights are stored minus one."""

    def __init__(self, size: int, eps: float, build: Build, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = build.vector(size)
        self.eps = eps
        self.zero_centered = zero_centered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., size]` -> the same."""
        if self.zero_centered:
            return zero_centered_rms_norm(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)


class GatedRMSNorm(StepModule):
    """RMSNorm times the SiLU of a gate; its weights are never zero-centred."""

    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__()
        self.weight = build.vector(size)
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Two `[..., size]` -> one."""
        return gated_rms_norm(x, gate, self.weight, self.eps)
