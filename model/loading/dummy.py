"""Dummy weights of norms and gains, which small random values would turn into zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from model.pieces import Piece


def fill_norms(module: nn.Module, neutral: Mapping[str, float] | None = None) -> Callable[[str, Piece, torch.Tensor], bool]:
    """A `fill` for `materialise`: gives a norm its neutral weight, one, or zero where it adds one to it, and a bias of zero.

    A norm weight is a vector of a module with "norm" in its class's name; `zero_centered` on that module says that it adds one.
    `neutral` adds parameters by name, with the value of all their elements.
    """
    norms = {
        f"{path}.{name}" if path else name: 0.0 if name == "bias" or getattr(owner, "zero_centered", False) else 1.0
        for path, owner in module.named_modules()
        if "norm" in type(owner).__name__.lower()
        for name, parameter in owner.named_parameters(recurse=False)
        if parameter.dim() == 1
    } | dict(neutral or {})

    def fill(name: str, piece: Piece, target: torch.Tensor) -> bool:
        if name not in norms:
            return False
        target.fill_(norms[name])
        return True

    return fill
