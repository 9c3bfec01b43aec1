"""Which sizes of heads the GPU kernels take. Layers of others run in torch, and are planned for so."""

from __future__ import annotations

LEAST_DELTA = 64
"""Elements of a Gated DeltaNet head. With 16, compiled kernels of prompt pieces gave wrong values (H200, Triton 3.6); from here on
they are tested on a GPU."""


def attention_fits(head_dim: int, block_size: int = 16) -> bool:
    """Whether the attention kernels take heads of `head_dim` elements and blocks of `block_size` positions."""
    return _power_of_two(head_dim) and head_dim >= 16 and block_size % 16 == 0


def delta_fits(key_dim: int, value_dim: int) -> bool:
    """Whether the Gated DeltaNet kernels take heads of these sizes."""
    return all(_power_of_two(size) and size >= LEAST_DELTA for size in (key_dim, value_dim))


def _power_of_two(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0
