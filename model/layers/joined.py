"""Weights that lie behind each other in memory: layers see them apart, kernels as one tensor."""

from __future__ import annotations

import torch
from torch import nn

from model.formats import DenseFormat, WeightFormat


def join(many: WeightFormat, one: WeightFormat) -> None:
    """Lay `one` where the next entry of `many` (along its first dimension) would be: both become views of one row-major tensor.

    Values are lost. The loader keeps the layout: it allocates what shares memory together.
    """
    assert isinstance(many, DenseFormat), "other formats have no one tensor"
    assert isinstance(one, DenseFormat), "other formats have no one tensor"
    entries, *shape = many.shape
    assert one.shape.numel() == torch.Size(shape).numel()
    memory = torch.empty(entries + 1, *shape, dtype=many.weight.dtype, device=many.weight.device)
    many.weight = nn.Parameter(memory[:entries], requires_grad=False)
    one.weight = nn.Parameter(memory[entries].view(one.shape), requires_grad=False)


def whole(many: WeightFormat) -> torch.Tensor:
    """`many` and, as its last entry, what `join` laid behind it."""
    weight = many.dequantize()
    return weight.as_strided((weight.shape[0] + 1, *weight.shape[1:]), weight.stride())
