"""Linear layers and the memory layout of their weights."""

from __future__ import annotations

import torch
from torch import nn

from model.formats import DenseFormat, WeightFormat
from model.layers.module import StepModule


def empty_weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, row_major: bool) -> nn.Parameter:
    """A weight `[..., out, in]` without values. Unless `row_major`, memory holds it transposed, as `[in, ..., out]`.

    One row times a transposed weight is a sum of contiguous rows, which CPU libraries read up to twice as fast as dot products
    (float32, measured); GPU kernels want the usual layout.
    """
    if row_major:
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
    memory = torch.empty((shape[-1], *shape[:-1]), dtype=dtype, device=device)
    return nn.Parameter(memory.movedim(0, -1), requires_grad=False)


class Linear(StepModule):
    """`x -> x W^T + b`. The weight lives in a format object, so that another encoding, or an adapter, needs no other layer."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, dtype: torch.dtype, device: torch.device, row_major: bool
    ) -> None:
        super().__init__()
        self.weight: WeightFormat = DenseFormat(empty_weight((out_features, in_features), dtype, device, row_major=row_major))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in] -> [T, out]`"""
        out = self.weight.linear(x)
        return out if self.bias is None else out.add_(self.bias)
