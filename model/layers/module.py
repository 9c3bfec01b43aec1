"""The base of layers that every step goes through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn


class StepModule(nn.Module):
    """A module whose parameters and submodules are found as fast as other attributes.

    torch keeps them in tables of their own, where Python looks last. A layer asks for some forty: as much time as several launches.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self._parameters or name in self._modules:
            self.__dict__[name] = value

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """As torch's, which may put other parameters into its table."""
        super()._apply(fn, recurse)
        self.__dict__.update(self._parameters)
        return self
