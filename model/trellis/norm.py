"""RMS norms as Trellis has them: with a gain, without one, and as a score of a normed row."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from kernels.rms_norm import rms_norm


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic that must not be rounded to 16 bits: float32, or float64 in a float64 model."""
    return torch.promote_types(dtype, torch.float32)


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps)` over the last axis, in at least float32."""
    return functional.rms_norm(x.to(wide(x.dtype)), (x.shape[-1],), None, eps)


def row_score(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """`sum_c unit_rms(x)_c weight_c + bias`: `[..., d] -> [...]`, at least float32.

    A product and a row sum, not a matrix product: the order of additions depends on the width alone, not on the number of rows.
    """
    dtype = wide(x.dtype)
    return (unit_rms(x, eps) * weight.to(dtype)).sum(-1) + bias.to(dtype)


class Gain(nn.Module):
    """RMSNorm with a gain: `[..., *shape] -> the same`, statistics over the last axis."""

    def __init__(self, *shape: int, eps: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(shape))
        self.eps = eps

    def forward(self, x: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
        """The norm with `gain`, or with `gain * factor`, multiplied first."""
        gain = self.gain if factor is None else self.gain * factor
        if gain.dim() == 1:
            return rms_norm(x, gain, self.eps)
        return (unit_rms(x, self.eps) * gain.to(wide(x.dtype))).to(x.dtype)
