"""How weights are stored and applied. A format's `dequantize` is the specification; `linear` may be faster but means the same.

Formats are modules, so that their tensors are parameters like any other: the loader fills them by name.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from model.errors import UnsupportedModel
from model.layers.module import StepModule


class WeightFormat(Protocol):
    """A weight `[..., out, in]` in some encoding."""

    @property
    def shape(self) -> torch.Size:
        """The logical shape, whatever the encoding stores."""
        ...

    def dequantize(self) -> torch.Tensor:
        """The weight as a dense floating-point tensor of `shape`."""
        ...

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in] -> [..., out]`: x times the transposed weight, for a weight of two dimensions."""
        ...


class DenseFormat(StepModule):
    """bfloat16, float16 or float32, stored as it is used. Its one parameter is `weight`."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        if not isinstance(weight, nn.Parameter):
            weight = nn.Parameter(weight, requires_grad=False)
        self.weight = weight

    @property
    def shape(self) -> torch.Size:
        """Shape of the stored tensor."""
        return self.weight.shape

    def dequantize(self) -> torch.Tensor:
        """The stored tensor itself, not a copy."""
        return self.weight

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in] -> [..., out]` in the weight's dtype."""
        return functional.linear(x, self.weight)


FORMAT_OF_DTYPE: dict[str, type[DenseFormat]] = {"BF16": DenseFormat, "F16": DenseFormat, "F32": DenseFormat}
"""Checkpoint dtype (as safetensors names it) -> format of a linear weight."""


def refuse_quantised(config_json: dict[str, Any]) -> None:
    """Raise UnsupportedModel, naming the method, when a config.json declares quantised weights (also in its `text_config`)."""
    for section in (config_json, config_json.get("text_config") or {}):
        quantised = section.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method", "unnamed")
            raise UnsupportedModel(f"quantised weights ({method}) are not served; served: {', '.join(FORMAT_OF_DTYPE)}")
