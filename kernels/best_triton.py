"""Each row's largest logit where the vocabulary's shards lie on several ranks: a few words cross, and no shard.

Every rank reduces its own shard, in parts of a row at a time. Rank 0, the head, gets each rank's value and place in two words of 8
bytes and takes the largest of all. What a call of n-th turn does for row p:

| place | in | written by | meaning |
|---|---|---|---|
| `words[r][p][0]` | the head's buffer | rank r, a peer | the value's 32 bits |
| `words[r][p][1]` | the head's buffer | rank r, a peer, released | the place's 32 bits, and n above them |
| `signals[p * line]` | every peer's signal memory | the head, released | n: the head has read the words of turn n |
| `turns[p]` | this rank's memory | this rank | the number of calls that have had a row p |
| `abort[0]` | pinned host memory | this rank's host | not 0: leave without the others; the output means nothing |

A peer writes words again when the head has told that it has read the last ones, which is long before the next call, as a rule. Who
has read the second word may read the first, and whatever the peer's launches before this one have written: its shard, in memory
that it shows (see `kernels.shards_triton`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import cdiv
from kernels.one_shot_words_triton import look
from kernels.peer_memory import PeerMemory

BEST_ROWS = 256
"""Most rows of a call over several ranks."""

BEST_WORDS = 2
"""Words of a row from one rank."""

PROGRAMS_AT_ONCE = 2112
"""Programs that keep a device busy: sixteen a multiprocessor."""

MOST_PARTS = 64
"""Of a row, so that one merge is compiled for all."""

BLOCK = 2048
NOWHERE = tl.constexpr(0x7FFFFFFF)


def best_rows(
    shard: torch.Tensor, columns: int, first: int, memory: PeerMemory | None = None, *, pdl: bool = False
) -> torch.Tensor:
    """(token, status) `[T, 2]` int64 of each row's largest logit, the lowest id among equals; elsewhere than on rank 0 unwritten.

    `shard [T, width]` has the logits of the tokens from `first` on, in its first `columns`; other ranks have theirs. Status 0: the
    token may be used. 1: all logits are -inf, 2: some are NaN or +inf; the token is 0 then.
    """
    rows = shard.shape[0]
    if memory is not None and rows > BEST_ROWS:
        raise ValueError(f"{rows} rows; the best of at most {BEST_ROWS} are found over ranks")
    if shard.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    best = torch.empty(rows, 2, dtype=torch.int64, device=shard.device)
    if rows == 0:
        return best
    parts = max(1, min(cdiv(columns, BLOCK), PROGRAMS_AT_ONCE // rows, MOST_PARTS))
    values = torch.empty(rows, parts, dtype=torch.float32, device=shard.device)
    places = torch.empty(rows, parts, dtype=torch.int32, device=shard.device)
    share = cdiv(cdiv(max(1, columns), parts), BLOCK) * BLOCK
    _best_kernel[(rows, parts)](
        shard, values, places, shard.stride(0), columns, share, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    lone = memory is None or memory.world == 1
    _merge_kernel[(rows,)](
        values,
        places,
        best,
        None if memory is None else memory.buffers,
        None if memory is None else memory.signals,
        None if memory is None else memory.turns,
        None if memory is None else memory.abort,
        first,
        parts,
        PARTS=MOST_PARTS,
        RANK=0 if memory is None else memory.rank,
        WORLD=1 if lone or memory is None else memory.world,
        WORDS_AT=0 if memory is None else memory.words_at,
        ROWS=BEST_ROWS,
        LINE=1 if memory is None else memory.line,
        SPINS=1 if memory is None else memory.waiting.spins,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return best


@triton.jit
def _best_kernel(shard, values, places, stride, columns, share, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The best of one part of a row. A NaN counts as +inf: either makes the row unusable."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.full([BLOCK], NOWHERE, tl.int32)
    end = tl.minimum(part * share + share, columns)
    for start in range(part * share, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(shard + row * stride + at, mask=at < end, other=float("-inf")).to(tl.float32)
        value = tl.where(value != value, float("inf"), value)
        better = value > best
        best = tl.where(better, value, best)
        place = tl.where(better, at, place)
    top = tl.max(best, 0)
    to = row * tl.num_programs(1) + part
    tl.store(values + to, top)
    tl.store(places + to, tl.min(tl.where(best == top, place, NOWHERE), 0))


@triton.jit(do_not_specialize=["parts"])
def _merge_kernel(
    values,
    places,
    best,
    buffers,
    signals,
    turns,
    abort,
    first,
    parts,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    WORDS_AT: tl.constexpr,
    ROWS: tl.constexpr,
    LINE: tl.constexpr,
    SPINS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    at = tl.arange(0, PARTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(values + row * parts + at, mask=at < parts, other=float("-inf"))
    place = tl.load(places + row * parts + at, mask=at < parts, other=NOWHERE)
    top = tl.max(value, 0)
    where = tl.min(tl.where(value == top, place, NOWHERE), 0)
    where = tl.where(where == NOWHERE, where, where + first)
    stop = tl.full([], 0, tl.int32)
    if WORLD > 1:
        turn = tl.load(turns + row) + 1
        head = tl.load(buffers).to(tl.pointer_type(tl.uint64)) + WORDS_AT
        if RANK == 0:
            for r in tl.static_range(1, WORLD):
                words = head + (r * ROWS + row) * 2
                second, stop = await_word(words + 1, turn, abort, stop, SPINS)
                theirs = tl.load(words, volatile=True).to(tl.uint32).to(tl.float32, bitcast=True)
                there = second.to(tl.uint32).to(tl.int32, bitcast=True)
                # Ranks' ids ascend: among equals the one before stays.
                where = tl.where(theirs > top, there, where)
                top = tl.maximum(top, theirs)
            tl.debug_barrier()
            for r in tl.static_range(1, WORLD):
                tell(signals, r, row * LINE, turn)
        else:
            stop = await_told(signals, RANK, row * LINE, turn - 1, abort, stop, SPINS)
            words = head + (RANK * ROWS + row) * 2
            tl.store(words, top.to(tl.uint32, bitcast=True).to(tl.uint64))
            tl.debug_barrier()
            mark = turn.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
            tl.atomic_xchg(words + 1, where.to(tl.uint32, bitcast=True).to(tl.uint64) | mark, sem="release", scope="sys")
        tl.store(turns + row, turn)
    if RANK == 0:
        status = tl.where(top == float("inf"), 2, tl.where(top == float("-inf"), 1, 0))
        usable = (status == 0) & (stop == 0)
        tl.store(best + row * 2, tl.where(usable, where, 0).to(tl.int64))
        tl.store(best + row * 2 + 1, status.to(tl.int64))


@triton.jit
def tell(signals, to, place, turn):
    """Set a signal of rank `to`: all that the program has read is read."""
    theirs = tl.load(signals + to).to(tl.pointer_type(tl.int32)) + place
    tl.atomic_xchg(theirs, turn, sem="release", scope="sys")


@triton.jit
def await_told(signals, own, place, turn, abort, stop, SPINS: tl.constexpr):
    """Wait until this rank's signal has reached `turn`, or the host says to stop; whether it has."""
    mine = tl.load(signals + own).to(tl.pointer_type(tl.int32)) + place
    seen = look(mine, "thread")
    spins = 0
    while (seen - turn < 0) & (stop == 0):
        seen = look(mine, "thread")
        spins += 1
        if spins % SPINS == 0:
            stop = look(abort, "thread")
    return stop


@triton.jit
def await_word(word, turn, abort, stop, SPINS: tl.constexpr):
    """(word, stop) when the word carries the number `turn`, or the host says to stop. What its writer has released may be read."""
    number = turn.to(tl.uint32, bitcast=True)
    seen = look(word, "thread")
    spins = 0
    while ((seen >> 32).to(tl.uint32) != number) & (stop == 0):
        seen = look(word, "thread")
        spins += 1
        if spins % SPINS == 0:
            stop = look(abort, "thread")
    return seen, stop
