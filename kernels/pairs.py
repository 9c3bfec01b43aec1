"""Expert outputs that nobody has summed over a row's choices yet: whoever adds them to the residual does it in the same launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_CHOICES = 32
"""Choices of a row that kernels which sum pairs can take: which of them are held here is one bit each."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """`value [T * k, H]`, contiguous: each choice's output times its weight, in the order of `experts [T, k]`.

    `local [num_experts]` is an expert's index here, or -1. Outputs of experts elsewhere are unwritten, and left out of sums.
    A sum is made in float32 in the order of the choices, and rounded to value's dtype. Kernels may read `experts` and `local`
    before those launched last are done: they are as old as the router, at least two launches.
    """

    value: torch.Tensor
    experts: torch.Tensor
    local: torch.Tensor

    def __post_init__(self) -> None:
        rows, top_k = self.experts.shape
        if len(self.value) != rows * top_k or top_k > MOST_CHOICES:
            raise ValueError(f"{len(self.value)} outputs for {rows} rows of {top_k} choices; a row has at most {MOST_CHOICES}")
        if not (self.value.is_contiguous() and self.experts.is_contiguous()):
            raise ValueError("outputs and choices must be contiguous")

    @property
    def shape(self) -> tuple[int, int]:
        """(T, H), of the sums."""
        return self.experts.shape[0], self.value.shape[1]

    @property
    def top_k(self) -> int:
        """Choices of a row."""
        return self.experts.shape[1]
