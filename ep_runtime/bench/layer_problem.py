"""What a layer kernel is measured on: random data of a real model's shape, candidate configurations, and a reference.

A problem has several sets of data, so that repeated calls do not find theirs in the L2 cache. References are those of package
`kernels` on the same values in float32 or float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

EPS = 1e-6
TARGET_BYTES = 256 << 20
"""Data of all sets together: several times the L2 cache."""

Tensors = tuple[torch.Tensor, ...]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Standard normal values on the device."""
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


class Problem(ABC):
    """One operator at one shape. `bytes` and `flops` are the least that a call must move and do."""

    bytes: float
    flops: float = 0.0
    tolerance = 1e-2

    @property
    def sets(self) -> int:
        """How many sets of data the calls rotate over."""
        return int(max(2, min(24, TARGET_BYTES // self.bytes)))

    @abstractmethod
    def configs(self) -> Sequence[Any]:
        """Candidates; the first is the default."""

    @abstractmethod
    def run(self, config: Any, number: int) -> Tensors:
        """Call the kernels on a set of data -> what they wrote."""

    @abstractmethod
    def expected(self) -> Tensors:
        """What the first set's run must write, from its values before any run."""

    def reset(self) -> None:  # noqa: B027
        """Give the first set its values before any run, where a run changes what it reads."""
