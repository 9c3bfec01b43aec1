"""RMSNorm (arXiv 1910.07467), plain and gated: statistics in float32, results in the input's dtype."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; `weight` has x's dtype. x may be strided."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def zero_centered_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm whose weights are stored minus one: the factor is `1 + weight`, added and applied in float32 before rounding."""
    return functional.rms_norm(x.float(), (x.shape[-1],), weight.float() + 1.0, eps).to(x.dtype)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm(x) * weight * silu(gate)` over the last dimension, x and gate of one shape; the gate is applied in float32."""
    normed = functional.rms_norm(x, (x.shape[-1],), weight, eps)
    return (normed.float() * functional.silu(gate.float())).to(x.dtype)
