"""Grouping of (row, choice) pairs by the programs that chose them: less waiting for memory than a launch of `kernels.grouping`.

What is made is the same. There are two ways: one program compares a few pairs with each other, no expert having more than one block
(starts are stored for experts that have pairs, only), or all programs count theirs, and the last one places them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import triton
import triton.language as tl

COMPARED_PLACES = 64
"""Up to this many places for pairs are compared each with each by the program that chose them; more are counted."""

MOST_PLACES = 512
"""Most places that can be compared."""


@triton.jit
def clear_counts(meta, held, HELD_POW2: tl.constexpr):
    """To be called before a barrier that `group_compared` comes after."""
    held_at = tl.arange(0, HELD_POW2)
    tl.store(meta + 1 + held_at, tl.zeros([HELD_POW2], tl.int32), mask=held_at < held)


@triton.jit
def held_places(chosen, local, rows, COLUMNS: tl.constexpr, PLACES: tl.constexpr):
    """Of experts `chosen [R, 1, LANES]`, COLUMNS in each of `rows` rows, the index here or -1, as PLACES places of `[R, C]`."""
    R: tl.constexpr = chosen.shape[0]
    C: tl.constexpr = PLACES // R
    first = tl.gather(chosen, tl.broadcast_to(tl.arange(0, C)[None, None, :], [R, 1, C]), 2)
    place = tl.arange(0, PLACES)
    real = (place // C < rows) & (place % C < COLUMNS)
    return tl.load(local + tl.reshape(first, [PLACES]), mask=real, other=-1).to(tl.int32)


@triton.jit
def group_compared(mine, meta, held, most_blocks, COLUMNS: tl.constexpr, R: tl.constexpr):
    """As `kernels.grouping.group_in_program`, of `held_places`, by comparing them all (at most MOST_PLACES) with each other."""
    PLACES: tl.constexpr = mine.shape[0]
    C: tl.constexpr = PLACES // R
    place = tl.arange(0, PLACES)
    pair = place // C * COLUMNS + place % C
    same = mine[:, None] == mine[None, :]
    below = (mine[None, :] < mine[:, None]) & (mine >= 0)[None, :]
    before = same & (place[None, :] < place[:, None])
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


@triton.jit
def held_choices(chosen, local, here):
    """The experts' indices here, or -1."""
    return tl.load(local + chosen, mask=here, other=-1).to(tl.int32)


@triton.jit
def count_pairs(counters, meta, mine, pair, here, pairs, held, most_blocks):
    """Count pairs of the experts `mine` in `counters`, -1 is elsewhere; a pair's expert and rank are a word for `place_counted`."""
    rank = tl.atomic_add(counters + mine, 1, mask=mine >= 0, sem="relaxed")
    ranks = meta + 1 + 2 * held + 3 * most_blocks + pairs
    tl.store(ranks + pair, (mine << 16) | rank, mask=here)


@triton.jit
def place_counted(counters, meta, pairs, held, most_blocks, SIZE: tl.constexpr, HELD_POW2: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """As `kernels.grouping.group_in_program`, of at most SIZE counted pairs (32767). Loads go past L1; `counters` are zero again.

    The first pair of each block tells of it.
    """
    pair, held_at = tl.arange(0, SIZE), tl.arange(0, HELD_POW2)
    blocks = meta + 1 + 2 * held
    listed = blocks + 3 * most_blocks
    counts = tl.load(counters + held_at, mask=held_at < held, other=0, cache_modifier=".cg")
    word = tl.load(listed + pairs + pair, mask=pair < pairs, other=-1, cache_modifier=".cg")
    # Blocks in the upper half of a word, pairs in the lower one.
    both = (tl.cdiv(counts, BLOCK_ROWS) << 16) | counts
    before = tl.cumsum(both, 0) - both
    mine, rank = tl.maximum(word >> 16, 0), word & 0xFFFF
    at, count = tl.gather(before, mine, 0), tl.gather(counts, mine, 0)
    place = (at & 0xFFFF) + rank
    block = blocks + (at >> 16) + rank // BLOCK_ROWS
    leads = (word >= 0) & (rank % BLOCK_ROWS == 0)
    tl.store(listed + place, pair, mask=word >= 0)
    tl.store(block, mine, mask=leads)
    tl.store(block + most_blocks, place, mask=leads)
    tl.store(block + 2 * most_blocks, tl.minimum(count - rank, BLOCK_ROWS), mask=leads)
    tl.store(meta, tl.sum(both >> 16, 0))
    tl.store(meta + 1 + held_at, counts, mask=held_at < held)
    tl.store(meta + 1 + held + held_at, before & 0xFFFF, mask=held_at < held)
    tl.debug_barrier()  # all threads have read the counters
    tl.store(counters + held_at, tl.zeros([HELD_POW2], tl.int32), mask=held_at < held)
