"""The sum of `kernels.pairs.Pairs` over a row's choices, as parts of the kernels that take them."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import triton
import triton.language as tl

from kernels.pairs import MOST_CHOICES

CHOICES = tl.constexpr(MOST_CHOICES)


@triton.jit
def held_choices(experts, local, row, TOP_K: tl.constexpr):
    """Bit c of the result: whether the expert of the row's choice c is held here. All choices are looked up at once.

    For use before a dependent launch's wait: loads go past L1, where a line of an earlier layer might be.
    """
    choice = tl.arange(0, CHOICES)
    real = choice < TOP_K
    expert = tl.load(experts + row * TOP_K + choice, mask=real, other=0, cache_modifier=".cg")
    held = tl.load(local + expert, mask=real, other=-1) >= 0
    return tl.sum(held.to(tl.int32) << choice, 0)


@triton.jit
def held_choices_of_rows(experts, local, first, rows, ROWS: tl.constexpr, TOP_K: tl.constexpr):
    """`[ROWS]` of `held_choices`, for rows `first ..`; those past the last one are as the last.

    One row after the other: of all at once the compiler would have every thread look up every choice.
    """
    place = tl.arange(0, ROWS)
    held = tl.zeros([ROWS], tl.int32)
    for row in tl.static_range(ROWS):
        held = tl.where(place == row, held_choices(experts, local, tl.minimum(first + row, rows - 1), TOP_K), held)
    return held


@triton.jit
def sum_choices(value, row, held, width, column, live, TOP_K: tl.constexpr):
    """Columns of the row's sum, float32, in the order of the choices; `live` has its shape. `row` and `held` may be `[N, 1]`."""
    total = tl.zeros(live.shape, tl.float32)
    for choice in tl.static_range(TOP_K):
        at = value + (row * TOP_K + choice) * width + column
        here = tl.where(((held >> choice) & 1) == 1, live, False)
        total += tl.load(at, mask=here, other=0.0).to(tl.float32)
    return total
