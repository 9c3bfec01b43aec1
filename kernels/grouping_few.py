"""Grouping of few (row, choice) pairs, no expert with more than one block: waits less for memory than `kernels.grouping`.

What is made is the same, but that starts are stored for experts that have pairs, only.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import triton
import triton.language as tl

COMPARED_PAIRS = 64
"""Up to this many pairs are compared each with each by the program that chose them."""


@triton.jit
def clear_counts(meta, held, HELD_POW2: tl.constexpr):
    """To be called before a barrier that `group_compared` comes after."""
    held_at = tl.arange(0, HELD_POW2)
    tl.store(meta + 1 + held_at, tl.zeros([HELD_POW2], tl.int32), mask=held_at < held)


@triton.jit
def group_compared(experts, local, meta, pairs, held, most_blocks, SIZE: tl.constexpr):
    """As `kernels.grouping.group_in_program`, by comparing all pairs (at most SIZE, and 1023) with each other."""
    pair = tl.arange(0, SIZE)
    chosen = tl.load(experts + pair, mask=pair < pairs, other=0, cache_modifier=".cg")
    mine = tl.load(local + chosen, mask=pair < pairs, other=-1).to(tl.int32)
    same = mine[:, None] == mine[None, :]
    below = (mine[None, :] < mine[:, None]) & (mine >= 0)[None, :]
    before = same & (pair[None, :] < pair[:, None])
    # Three sums in one, of at most 10 bits each.
    sums = tl.sum(before.to(tl.int32) + (same.to(tl.int32) << 10) + (below.to(tl.int32) << 20), 1)
    rank, count, start = sums & 1023, (sums >> 10) & 1023, sums >> 20
    leads = (mine >= 0) & (rank == 0)
    number = tl.cumsum(leads.to(tl.int32), 0)
    block = meta + 2 * held + number
    tl.store(meta, tl.max(number, 0))
    tl.store(meta + 1 + mine, count, mask=leads)
    tl.store(meta + 1 + held + mine, start, mask=leads)
    tl.store(block, mine, mask=leads)
    tl.store(block + most_blocks, start, mask=leads)
    tl.store(block + 2 * most_blocks, count, mask=leads)
    tl.store(meta + 1 + 2 * held + 3 * most_blocks + start + rank, pair, mask=mine >= 0)
