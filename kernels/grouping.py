"""Grouping of (row, choice) pairs by the expert that runs them, on the device, so that nothing waits for counts.

Shape letters: T rows, k choices a row, P = T k pairs (pair p is choice `p % k` of row `p // k`), E experts held here, M rows of a
block. An expert with c pairs has `ceil(c / M)` blocks; experts without pairs have none. The int32 buffer `meta` holds, in order:

| words | what |
|---|---|
| 1 | number of blocks |
| E | pairs of each expert |
| E | where each expert's pairs start in `pairs` |
| B, B, B | each block's expert, first place in `pairs`, and rows (1 to M), for at most B blocks |
| P | pairs, those of one expert next to each other, in no fixed order |
| P | of those who group: each pair's rank among its expert's pairs, or those of one of its counters; with its expert, or alone |
| COUNTERS, E | of many pairs, where those of each counter start |

The order of one expert's pairs may differ from run to run. No result depends on it: a pair's product does not depend on the rows
beside it, and sums over a row's choices are taken in the order of choices.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, bind, cdiv, next_power_of_2

SINGLE_PAIRS = 4096
"""Up to this many pairs one program groups them; more are counted and placed by two kernels of many programs."""

CHUNK = 1024
"""Pairs of one program of those two."""

COUNTERS = 16
"""Counters an expert, which those programs share: many additions to one wait for each other."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs grouped on the device. `most_blocks` is a bound from shapes alone: the grid of kernels that run over blocks."""

    meta: torch.Tensor
    held: int
    pairs: int
    block_rows: int
    most_blocks: int


def most_blocks(pairs: int, held: int, block_rows: int) -> int:
    """The most blocks that `pairs` pairs over `held` experts can make."""
    return min(pairs, held + pairs // block_rows)


def empty_groups(pairs: int, held: int, block_rows: int, device: torch.device) -> Groups:
    """Groups whose buffer a kernel has yet to fill."""
    blocks = most_blocks(pairs, held, block_rows)
    counters = COUNTERS * held if pairs > SINGLE_PAIRS else 0
    meta = torch.empty(1 + 2 * held + 3 * blocks + 2 * pairs + counters, dtype=torch.int32, device=device)
    return Groups(meta, held, pairs, block_rows, blocks)


def group_pairs(
    experts: torch.Tensor, local: torch.Tensor, held: int, block_rows: int, turns: torch.Tensor | None = None
) -> Groups:
    """Group the pairs of `experts [T, k]`; `local [num_experts]`: an expert's index here, or -1 (its pairs are left out).

    `turns`, int32, 1 + COUNTERS * held, is zero before and after, and saves a launch; launches that share it must not overlap.
    """
    pairs = experts.numel()
    groups = empty_groups(pairs, held, block_rows, experts.device)
    if pairs <= SINGLE_PAIRS:
        launch = _single(max(16, next_power_of_2(pairs)), held, block_rows)
        launch((1, 1, 1), experts, local, groups.meta, pairs, held, groups.most_blocks)
        return groups
    if turns is None:
        turns = torch.zeros(1 + COUNTERS * held, dtype=torch.int32, device=experts.device)
    grid = (cdiv(pairs, CHUNK), 1, 1)
    count, place = _many(held, block_rows)
    count(grid, experts, local, groups.meta, turns, pairs, held, groups.most_blocks)
    place(grid, experts, local, groups.meta, turns, pairs, held, groups.most_blocks)
    return groups


@cache
def _single(size: int, held: int, block_rows: int) -> Launch:
    warps = min(16, max(4, size // 128))
    return bind(_group_kernel, SIZE=size, HELD_POW2=next_power_of_2(held), BLOCK_ROWS=block_rows, num_warps=warps)


@cache
def _many(held: int, block_rows: int) -> tuple[Launch, Launch]:
    of = {"SIZE": CHUNK, "COUNTERS": COUNTERS, "num_warps": 8}
    return bind(_count_kernel, **of), bind(_place_kernel, HELD_POW2=next_power_of_2(held), BLOCK_ROWS=block_rows, **of)


@triton.jit
def group_in_program(
    experts, local, meta, pairs, held, most_blocks, SIZE: tl.constexpr, HELD_POW2: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    """Group all pairs (at most SIZE) in one program; `experts` may have been written by it before its last barrier."""
    held_at = tl.arange(0, HELD_POW2)
    tl.store(meta + 1 + held_at, tl.zeros([HELD_POW2], tl.int32), mask=held_at < held)
    tl.debug_barrier()
    pair = tl.arange(0, SIZE)
    expert, rank = _count(experts, local, meta + 1, pair, pairs)
    tl.debug_barrier()
    _place(meta, pair, expert, rank, held, most_blocks, HELD_POW2, BLOCK_ROWS)


@triton.jit
def block_of(meta, block, held, most_blocks):
    """The block's expert, its first place, its rows, and where the list of pairs begins. Read past L1: it may be before a wait."""
    blocks = meta + 1 + 2 * held
    expert = tl.load(blocks + block, cache_modifier=".cg")
    start = tl.load(blocks + most_blocks + block, cache_modifier=".cg")
    rows = tl.load(blocks + 2 * most_blocks + block, cache_modifier=".cg")
    return expert.to(tl.int64), start, rows, blocks + 3 * most_blocks


@triton.jit
def _count(experts, local, counters, pair, pairs):
    chosen = tl.load(experts + pair, mask=pair < pairs, other=0)
    expert = tl.load(local + chosen, mask=pair < pairs, other=-1).to(tl.int32)
    rank = tl.atomic_add(counters + expert, 1, mask=expert >= 0, sem="relaxed")
    return expert, rank


@triton.jit
def _list_blocks(meta, counts, held_at, held, most_blocks, BLOCK_ROWS: tl.constexpr):
    """Store the number of blocks, and the list of them."""
    starts = tl.cumsum(counts, 0) - counts
    number = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    first = tl.cumsum(number, 0) - number
    tl.store(meta, tl.sum(number, 0))
    blocks = meta + 1 + 2 * held
    for turn in range(tl.max(number, 0)):
        has = turn < number
        tl.store(blocks + first + turn, held_at, mask=has)
        tl.store(blocks + most_blocks + first + turn, starts + turn * BLOCK_ROWS, mask=has)
        tl.store(blocks + 2 * most_blocks + first + turn, tl.minimum(counts - turn * BLOCK_ROWS, BLOCK_ROWS), mask=has)


@triton.jit
def _place(meta, pair, expert, rank, held, most_blocks, HELD_POW2: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Store blocks and places. Loads go past L1, which atomics of this kernel do not pass through."""
    held_at = tl.arange(0, HELD_POW2)
    counts = tl.load(meta + 1 + held_at, mask=held_at < held, other=0, cache_modifier=".cg")
    tl.store(meta + 1 + held + held_at, tl.cumsum(counts, 0) - counts, mask=held_at < held)
    _list_blocks(meta, counts, held_at, held, most_blocks, BLOCK_ROWS)
    tl.debug_barrier()
    start = tl.load(meta + 1 + held + expert, mask=expert >= 0, other=0, cache_modifier=".cg")
    tl.store(meta + 1 + 2 * held + 3 * most_blocks + start + rank, pair, mask=expert >= 0)


@triton.jit(do_not_specialize=["pairs", "held", "most_blocks"])
def _group_kernel(
    experts, local, meta, pairs, held, most_blocks, SIZE: tl.constexpr, HELD_POW2: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    group_in_program(experts, local, meta, pairs, held, most_blocks, SIZE, HELD_POW2, BLOCK_ROWS)


@triton.jit(do_not_specialize=["pairs", "held", "most_blocks"])
def _count_kernel(experts, local, meta, turns, pairs, held, most_blocks, SIZE: tl.constexpr, COUNTERS: tl.constexpr):
    """Each pair's rank among those that its program's counters have counted."""
    pair = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    expert, rank = _count(experts, local, turns + 1 + tl.program_id(0) % COUNTERS * held, pair, pairs)
    ranks = meta + 1 + 2 * held + 3 * most_blocks + pairs
    tl.store(ranks + pair, rank, mask=expert >= 0)


@triton.jit(do_not_specialize=["pairs", "held", "most_blocks"])
def _place_kernel(
    experts,
    local,
    meta,
    turns,
    pairs,
    held,
    most_blocks,
    SIZE: tl.constexpr,
    COUNTERS: tl.constexpr,
    HELD_POW2: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Programs that store to the same place store the same. The last one leaves zeros where programs have counted."""
    pair = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    chosen = tl.load(experts + pair, mask=pair < pairs, other=0)
    expert = tl.load(local + chosen, mask=pair < pairs, other=-1).to(tl.int32)
    listed = meta + 1 + 2 * held + 3 * most_blocks
    rank = tl.load(listed + pairs + pair, mask=expert >= 0, other=0)
    mine, held_at, counter = tl.program_id(0) % COUNTERS, tl.arange(0, HELD_POW2), tl.arange(0, COUNTERS)
    live = held_at < held
    counted = turns + 1 + counter[:, None] * held + held_at[None, :]
    each = tl.load(counted, mask=live[None, :], other=0, cache_modifier=".cg")
    counts, before = tl.sum(each, 0), tl.sum(tl.where((counter < mine)[:, None], each, 0), 0)
    starts = tl.cumsum(counts, 0) - counts
    own = listed + 2 * pairs + mine * held
    tl.store(own + held_at, starts + before, mask=live)
    if tl.program_id(0) == 0:
        tl.store(meta + 1 + held_at, counts, mask=live)
        tl.store(meta + 1 + held + held_at, starts, mask=live)
        _list_blocks(meta, counts, held_at, held, most_blocks, BLOCK_ROWS)
    tl.debug_barrier()
    start = tl.load(own + expert, mask=expert >= 0, other=0, cache_modifier=".cg")
    tl.store(listed + start + rank, pair, mask=expert >= 0)
    if tl.atomic_add(turns, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(turns, 0)
        tl.store(counted, tl.zeros([COUNTERS, HELD_POW2], tl.int32), mask=live[None, :])
