"""Uniform values from a counter, straight into a weight's place on the GPU: one launch, no temporary.

The value at place p of a tensor with a 64-bit `key` is that of splitmix64's mixer, with arithmetic shifts, for `p + key`: its top
24 bits as a signed integer, times `scale`. Integers wrap, and 24 bits are exact in a float32: every device gives the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.launch import cdiv

BLOCK = 4096


def fill_uniform(target: torch.Tensor, start: int, strides: Sequence[int], key: int, scale: float) -> bool:
    """Fill `target` (of any strides) where element i.. is at place `start + i * strides[0] + ...` of its tensor; key is int64.

    False, with nothing done, where more than two dimensions are left once those that lie behind each other are one.
    """
    dims = [(n, step, own) for n, step, own in zip(target.shape, strides, target.stride(), strict=True) if n != 1]
    merged: list[tuple[int, int, int]] = []
    for count, step, own in reversed(dims):
        if merged and (step, own) == (merged[0][0] * merged[0][1], merged[0][0] * merged[0][2]):
            merged[0] = (count * merged[0][0], *merged[0][1:])
        else:
            merged.insert(0, (count, step, own))
    if len(merged) > 2 or target.numel() >= 1 << 31:
        return False
    (_, row_step, row), (columns, step, column) = [(1, 0, 0)] * (2 - len(merged)) + merged
    if target.numel():
        first = (start + key + (1 << 63)) % (1 << 64) - (1 << 63)
        _uniform_kernel[(cdiv(target.numel(), BLOCK),)](
            target, first, target.numel(), columns, row_step, step, row, column, SCALE=scale, BLOCK=BLOCK, num_warps=8
        )
    return True


@triton.jit(do_not_specialize=["first", "elements", "columns", "row_step", "step", "row", "column"])
def _uniform_kernel(target, first, elements, columns, row_step, step, row, column, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """`first`, and so all sums of places and key, wraps as int64."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    line, place = (at // columns).to(tl.int64), (at % columns).to(tl.int64)
    mixed = (line * row_step + place * step + first) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    value = (mixed >> 40).to(tl.float32) * SCALE
    tl.store(target + line * row + place * column, value.to(target.dtype.element_ty), mask=at < elements)
