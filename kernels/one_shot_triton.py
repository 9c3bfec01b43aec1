"""Sums over ranks through peer memory, in one launch: each rank shows its partial to the others and adds all of them itself.

A few rows go in words that need no signal: see `kernels.one_shot_words_triton`. More rows go in tiles of some rows, as told here. A
launch has at most PROGRAMS programs, whatever its shape, so that all of them run at once; program p owns every PROGRAMS-th tile. It
writes a tile of the partial into its rank's share of every peer's buffer, in the half that is in turn, tells the peers, reads its
next tile, waits until all have told it of theirs, and adds the ranks' rows in rank order in float32: the same bits on all ranks.
The partial may be pairs: a tile is the sum of its rows' choices then, and goes in parts. The sum can be added to the residual and
normalised in the same launch. The read of a signal that ends a wait acquires, so that plain reads of what the peers have written
may follow it. Other programs use the link while one waits. Shards are gathered in the same way, but read where they are.

| word | in | written by | meaning |
|---|---|---|---|
| `signals[p * line + r]` | every rank's signal memory | rank r, a peer | `n * tiles + i`: i of r's parts of call n are readable |
| `turns[p]` | this rank's memory | this rank | the number of calls that program p has finished |
| `abort[0]` | pinned host memory | this rank's host | not 0: leave without the peers; the output means nothing |

A tile that does not go in parts is one part. `tiles` is more than the parts that a program ever has. Signals only grow, by less
than 2^31 at a time, so that they may pass the largest int32. Two halves suffice: a rank writes half n % 2 again in program p's call
n + 2, which it enters only after every peer has told it of p's call n + 1, and a peer tells of n + 1 only after its call n has
ended. What program p writes lies where only program p ever writes, in every call, in parts or not. Addresses come from device
tables, so that graphs can outlive an epoch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, bind, cdiv, next_power_of_2
from kernels.one_shot_words_triton import look, one_shot_words_kernel
from kernels.pairs import Pairs
from kernels.pairs_triton import held_choices_of_rows, sum_choices
from kernels.peer_memory import GATHER_BLOCK, PROGRAMS, WORD_ROWS, PeerMemory, Waiting, gather_share

MULTIPROCESSORS = 132
REGISTERS = 65536
"""Of a device of the Hopper generation, and of each of its multiprocessors."""

TILE_BYTES = 16384
"""Bytes of the rows that a program moves at a time, about."""

TILE_ROWS = 16
"""Most of them: choices of rows are looked up in unrolled code, and those of 128 rows take a minute to compile.

It bounds tiles of partials, too: all sums of one memory divide rows alike, or a program would write where another one does.
"""

PAIRS_PARTS = 2
"""Parts of a tile, one after the other, where choices are summed: their outputs come through the same registers."""

TILE_WARPS = 8
WORD_WARPS = 8


def reduce_rows(memory: PeerMemory, partial: torch.Tensor | Pairs, *, pdl: bool = False) -> torch.Tensor:
    """Sum over ranks of `partial [T, width]` (bfloat16, float16 or float32, contiguous), in its dtype."""
    value = partial.value if isinstance(partial, Pairs) else partial
    out = torch.empty(partial.shape, dtype=value.dtype, device=value.device)
    _launch(memory, partial, None, None, None, None, None, out, 0.0, False, pdl)
    return out


def reduce_add_norm_rows(
    memory: PeerMemory,
    partial: torch.Tensor | Pairs,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`x += sum over ranks of partial` in place, rounded to x's dtype, then RMSNorm of x: all `[T, width]`, contiguous.

    With a shared expert's output `shared [T, width]` and gate logit `[T, 1]`, x also gains `sigmoid(shared_gate) * shared`.
    `partial` may be pairs, whose sums it makes itself. With `pdl` it may start while the launch before it ends.
    """
    out = torch.empty_like(x)
    _launch(memory, partial, x, shared, shared_gate, weight, out, None, eps, zero_centered, pdl)
    return out


def gather_rows(memory: PeerMemory, shard: torch.Tensor) -> torch.Tensor:
    """On rank 0 the shards `[T, width]` of all ranks side by side in rank order, `[T, world * width]` float32; elsewhere empty.

    Every rank waits for every other, so that nobody writes what is still read.
    """
    rows, width = shard.shape
    if not memory.fits_gather(rows, width):
        raise ValueError(
            f"{rows} rows of {width} do not fit {memory.programs} parts of {memory.capacity // memory.programs} elements"
        )
    shard = shard.contiguous()
    out = torch.empty(rows if memory.rank == 0 else 0, memory.world * width, dtype=torch.float32, device=shard.device)
    if rows:
        share = gather_share(rows * width, memory.programs)
        _gather_kernel[(cdiv(rows * width, share),)](
            shard,
            out,
            memory.buffers,
            memory.signals,
            memory.turns,
            memory.abort,
            rows,
            width,
            share,
            CAPACITY=memory.capacity,
            REGION=memory.capacity // memory.programs,
            RANK=memory.rank,
            WORLD=memory.world,
            BLOCK=GATHER_BLOCK,
            LINE=memory.line,
            SPINS=memory.waiting.spins,
            PAUSE=memory.waiting.pause_ns,
            READER=memory.waiting.reader,
            num_warps=8,
        )
    return out


def _registers(programs: int, warps: int) -> int:
    """Most registers of a thread with which all programs run at once; they are given out eight at a time."""
    return REGISTERS // (cdiv(programs, MULTIPROCESSORS) * warps * 32) // 8 * 8


def _launch(memory, partial, x, shared, shared_gate, weight, normed, total, eps, zero_centered, pdl) -> None:
    rows, width = partial.shape
    pairs = partial if isinstance(partial, Pairs) else None
    dtype = partial.dtype if pairs is None else pairs.value.dtype
    if not memory.fits(rows, width):
        raise ValueError(f"{rows} rows of {width} do not fit {memory.share} elements")
    if (pairs is None and not partial.is_contiguous()) or (x is not None and not x.is_contiguous()):
        raise ValueError("rows must be contiguous")
    if rows == 0:
        return
    added = (x, shared, shared_gate, weight, normed, total)
    strides = (0 if shared is None else shared.stride(0), 0 if shared_gate is None else shared_gate.stride(0))
    flags = (memory.rank, memory.world, memory.waiting, x is not None, shared is not None, zero_centered)
    if memory.in_words(rows, width, dtype):
        _launch_words(memory, partial, rows, width, added, strides, eps, flags, pdl)
        return
    block = next_power_of_2(width)
    tile = max(1, min(TILE_ROWS, TILE_BYTES // (block * dtype.itemsize)))
    parts = 1 if pairs is None else min(PAIRS_PARTS, tile)
    top_k = 0 if pairs is None else pairs.top_k
    _tiles(memory.capacity, memory.share, memory.programs, memory.line, width, tile, parts, top_k, *flags)(
        (min(cdiv(rows, tile), memory.programs), 1, 1),
        partial if pairs is None else pairs.value,
        None if pairs is None else pairs.experts,
        None if pairs is None else pairs.local,
        *added,
        memory.buffers,
        memory.signals,
        memory.turns,
        memory.abort,
        rows,
        width,
        *strides,
        eps,
    )


@cache
def _tiles(
    capacity: int,
    share: int,
    programs: int,
    line: int,
    width: int,
    tile: int,
    parts: int,
    top_k: int,
    rank: int,
    world: int,
    waiting: Waiting,
    add: bool,
    shared: bool,
    zero_centered: bool,
) -> Launch:
    most = cdiv(cdiv(share // width, tile), programs)
    return bind(
        _one_shot_kernel,
        CAPACITY=capacity,
        PROGRAMS=programs,
        TILES=next_power_of_2(most * PAIRS_PARTS + 1),
        ROWS=tile // parts,
        PARTS=parts,
        BLOCK=next_power_of_2(width),
        SHARE=share,
        LINE=line,
        PAUSE=waiting.pause_ns,
        TOP_K=top_k,
        **_flags(rank, world, waiting, add, shared, zero_centered),
        num_warps=TILE_WARPS,
        maxnreg=_registers(programs, TILE_WARPS),
    )


def _flags(rank: int, world: int, waiting: Waiting, add: bool, shared: bool, zero_centered: bool) -> dict[str, Any]:
    flags = {"RANK": rank, "WORLD": world, "SPINS": waiting.spins, "READER": waiting.reader}
    return flags | {"ADD": add, "SHARED": shared, "ZERO_CENTERED": zero_centered}


def _launch_words(memory, partial, rows, width, added, strides, eps, flags, pdl) -> None:
    pairs = partial if isinstance(partial, Pairs) else None
    _words(memory.words_at, memory.slot, width, 0 if pairs is None else pairs.top_k, pdl, *flags)(
        (rows, 1, 1),
        partial if pairs is None else pairs.value,
        None if pairs is None else pairs.experts,
        None if pairs is None else pairs.local,
        *added,
        memory.buffers,
        memory.turns[PROGRAMS:],
        memory.abort,
        width // 2,
        *strides,
        eps,
    )


@cache
def _words(
    words_at: int,
    slot: int,
    width: int,
    top_k: int,
    pdl: bool,
    rank: int,
    world: int,
    waiting: Waiting,
    add: bool,
    shared: bool,
    zero_centered: bool,
) -> Launch:
    block = next_power_of_2(width // 2)
    return bind(
        one_shot_words_kernel,
        WORDS_AT=words_at,
        SLOT=slot,
        BLOCK=block,
        TOP_K=top_k,
        PDL=pdl,
        **_flags(rank, world, waiting, add, shared, zero_centered),
        num_warps=min(WORD_WARPS, max(1, block // 64)),
        maxnreg=_registers(WORD_ROWS, WORD_WARPS),
        launch_pdl=pdl,
    )


@triton.jit
def _tell(signals, program, told, RANK: tl.constexpr, WORLD: tl.constexpr, LINE: tl.constexpr):
    """Tell every peer what is readable of this rank's part: all that the program has written before."""
    tl.debug_barrier()
    for r in tl.static_range(WORLD):
        if r != RANK:
            theirs = tl.load(signals + r).to(tl.pointer_type(tl.int32)) + program * LINE + RANK
            tl.atomic_xchg(theirs, told, sem="release", scope="sys")


@triton.jit
def _wait(
    signals,
    abort,
    program,
    told,
    stop,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    LINE: tl.constexpr,
    SPINS: tl.constexpr,
    PAUSE: tl.constexpr,
    READER: tl.constexpr,
):
    """Wait until every peer has told as much, or the host says to stop; whether it has. With `stop` it has said so before.

    The host's word is never the target of an atomic operation, which its link to the device may not have.
    """
    mine = tl.load(signals + RANK).to(tl.pointer_type(tl.int32)) + program * LINE
    for r in tl.static_range(WORLD):
        if r != RANK:
            seen = look(mine + r, READER)
            spins = 0
            while (seen - told < 0) & (stop == 0):
                if PAUSE > 0:
                    tl.inline_asm_elementwise(
                        "nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [PAUSE], dtype=tl.int32, is_pure=False, pack=1
                    )
                seen = look(mine + r, READER)
                spins += 1
                if spins % SPINS == 0:
                    stop = look(abort, "warps" if READER == "warps" else "thread")
            if READER == "warps":
                # An acquiring load whose value nobody uses would be left out.
                tl.atomic_max(mine + r, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    return stop


@triton.jit(do_not_specialize=["rows"])
def _gather_kernel(
    shard,
    out,
    buffers,
    signals,
    turns,
    abort,
    rows,
    width,
    share,
    CAPACITY: tl.constexpr,
    REGION: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    LINE: tl.constexpr,
    SPINS: tl.constexpr,
    PAUSE: tl.constexpr,
    READER: tl.constexpr,
):
    program = tl.program_id(0)
    first = program * share
    end = tl.minimum(first + share, rows * width)
    turn = tl.load(turns + program) + 1
    place = (turn & 1).to(tl.int64) * CAPACITY + program * REGION
    dtype: tl.constexpr = shard.dtype.element_ty
    own = tl.multiple_of(tl.load(buffers + RANK).to(tl.pointer_type(dtype)), 16)
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(own + place + (at - first), tl.load(shard + at, mask=at < end), mask=at < end)
    _tell(signals, program, turn, RANK, WORLD, LINE)
    _wait(signals, abort, program, turn, tl.full([], 0, tl.int32), RANK, WORLD, LINE, SPINS, PAUSE, READER)
    if RANK == 0:
        for r in tl.static_range(WORLD):
            theirs = tl.multiple_of(tl.load(buffers + r).to(tl.pointer_type(dtype)), 16)
            for start in range(first, end, BLOCK):
                at = start + tl.arange(0, BLOCK)
                value = tl.load(theirs + place + (at - first), mask=at < end, other=0.0).to(tl.float32)
                row = at // width
                tl.store(out + row.to(tl.int64) * (WORLD * width) + r * width + (at - row * width), value, mask=at < end)
    tl.store(turns + program, turn)


@triton.jit
def _first_row(program, step, PROGRAMS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Of the program's part number `step`."""
    return ((program + step // PARTS * PROGRAMS) * PARTS + step % PARTS) * ROWS


@triton.jit
def _own_rows(partial, experts, local, first, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr):
    """This rank's partial of ROWS rows from `first` on, those there are; with TOP_K the sums of their choices."""
    row, at = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (at < width)[None, :]
    if TOP_K:
        held = held_choices_of_rows(experts, local, first, rows, ROWS, TOP_K)[:, None]
        return sum_choices(partial, row.to(tl.int64)[:, None], held, width, at[None, :], here, TOP_K).to(partial.dtype.element_ty)
    else:
        return tl.load(partial + row.to(tl.int64)[:, None] * width + at[None, :], mask=here, other=0.0)


@triton.jit
def _show(buffers, mine, half, to, here, SHARE: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Write rows into this rank's share of every peer's buffer."""
    for r in tl.static_range(WORLD):
        if r != RANK:
            theirs = tl.multiple_of(tl.load(buffers + r).to(tl.pointer_type(mine.dtype)), 16) + half
            tl.store(theirs + (RANK - (1 if r < RANK else 0)) * SHARE + to, mine, mask=here)


@triton.jit
def _total(own, mine, to, here, SHARE: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Rows of all ranks, those of the peers from this rank's buffer, added in rank order, in float32.

    A sum is a value of the model's dtype wherever it is made: the reference rounds it there, too.
    """
    value = tl.zeros(mine.shape, tl.float32)
    for r in tl.static_range(WORLD):
        if r == RANK:
            value += mine.to(tl.float32)
        else:
            value += tl.load(own + (r - (1 if r > RANK else 0)) * SHARE + to, mask=here, other=0.0).to(tl.float32)
    return value.to(mine.dtype).to(tl.float32)


@triton.jit
def _add_and_norm(x, weight, normed, value, to, here, at, width, eps, ZERO_CENTERED: tl.constexpr):
    """Store the residual, as rounded, with rows added, and the norm of what was stored."""
    value += tl.load(x + to, mask=here, other=0.0).to(tl.float32)
    rounded = value.to(x.dtype.element_ty)
    tl.store(x + to, rounded, mask=here)
    value = rounded.to(tl.float32)
    factor = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        factor += 1.0
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(normed + to, (value * scale[:, None] * factor[None, :]).to(normed.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows"])
def _one_shot_kernel(
    partial, experts, local, x, shared, shared_gate, weight, normed, total, buffers, signals, turns, abort,
    rows, width, shared_stride, gate_stride, eps,
    CAPACITY: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, PROGRAMS: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr, TOP_K: tl.constexpr, ADD: tl.constexpr,
    SHARED: tl.constexpr, ZERO_CENTERED: tl.constexpr, LINE: tl.constexpr, SPINS: tl.constexpr, PAUSE: tl.constexpr,
    READER: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    turn = tl.load(turns + program) + 1
    half = (turn & 1).to(tl.int64) * CAPACITY
    dtype: tl.constexpr = partial.dtype.element_ty
    own = tl.multiple_of(tl.load(buffers + RANK).to(tl.pointer_type(dtype)), 16) + half
    stop = 0
    told = turn * TILES
    steps = tl.cdiv(tl.cdiv(rows, PARTS * ROWS) - program, PROGRAMS) * PARTS
    first = _first_row(program, 0, PROGRAMS, PARTS, ROWS)
    mine = _own_rows(partial, experts, local, first, rows, width, ROWS, BLOCK, TOP_K)
    for step in range(steps):
        row = first + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & (at < width)[None, :]
        to = row.to(tl.int64)[:, None] * width + at[None, :]
        _show(buffers, mine, half, to, here, SHARE, RANK, WORLD)
        told += 1
        _tell(signals, program, told, RANK, WORLD, LINE)
        # What is shown next is read while the peers' rows are on their way.
        first = _first_row(program, step + 1, PROGRAMS, PARTS, ROWS)
        following = _own_rows(partial, experts, local, first, rows, width, ROWS, BLOCK, TOP_K)
        stop = _wait(signals, abort, program, told, stop, RANK, WORLD, LINE, SPINS, PAUSE, READER)
        value = _total(own, mine, to, here, SHARE, RANK, WORLD)
        if ADD:
            if SHARED:
                gate = tl.load(shared_gate + row * gate_stride, mask=row < rows, other=0.0).to(tl.float32)
                extra = shared + row.to(tl.int64)[:, None] * shared_stride + at[None, :]
                value += tl.sigmoid(gate)[:, None] * tl.load(extra, mask=here, other=0.0).to(tl.float32)
            _add_and_norm(x, weight, normed, value, to, here, at, width, eps, ZERO_CENTERED)
        else:
            tl.store(total + to, value.to(dtype), mask=here)
        mine = following
    tl.store(turns + program, turn)
