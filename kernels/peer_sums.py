"""Sums over ranks through peer memory: which kernel a sum takes, and its launch.

A few rows go in words (`kernels.one_shot_words_triton`), more in tiles: to all ranks at once (`kernels.one_shot_triton`), or, with
more than two ranks, in two shots (`kernels.two_shot_triton`). All of them add in rank order and give the same bits on all ranks.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from kernels.launch import Launch, bind, cdiv, next_power_of_2
from kernels.one_shot_triton import one_shot_kernel
from kernels.one_shot_words_triton import one_shot_words_kernel
from kernels.pairs import Pairs
from kernels.peer_memory import PROGRAMS, WORD_ROWS, PeerMemory, Waiting
from kernels.two_shot_triton import two_shot_kernel

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


def registers(programs: int, warps: int) -> int:
    """Most registers of a thread with which all programs run at once; they are given out eight at a time."""
    return REGISTERS // (cdiv(programs, MULTIPROCESSORS) * warps * 32) // 8 * 8


def tile_rows(width: int, dtype: torch.dtype) -> int:
    """Rows of a tile: the same in every call of a memory."""
    return max(1, min(TILE_ROWS, TILE_BYTES // (next_power_of_2(width) * dtype.itemsize)))


def told_a_call(share: int, width: int, tile: int, programs: int, two_shots: bool) -> int:
    """By how much a program's signals may grow in a call, more than they do: the same for every kernel of a memory.

    What a peer is told of a part: that it is there, and in two shots also that it is summed.
    """
    most = cdiv(cdiv(share // width, tile), programs) * PAIRS_PARTS * (2 if two_shots else 1)
    return next_power_of_2(most + 1)


def word_warps(width: int) -> int:
    """Of a program that moves a row in words."""
    return min(WORD_WARPS, max(1, next_power_of_2(width // 2) // 64))


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
    tile = tile_rows(width, dtype)
    parts = 1 if pairs is None else min(PAIRS_PARTS, tile)
    top_k = 0 if pairs is None else pairs.top_k
    kernel = two_shot_kernel if memory.two_shots else one_shot_kernel
    _tiles(kernel, memory.capacity, memory.share, memory.programs, memory.line, width, tile, parts, top_k, *flags)(
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
    kernel: Any,
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
    return bind(
        kernel,
        CAPACITY=capacity,
        PROGRAMS=programs,
        TILES=told_a_call(share, width, tile, programs, kernel is two_shot_kernel),
        ROWS=tile // parts,
        PARTS=parts,
        BLOCK=next_power_of_2(width),
        SHARE=share,
        LINE=line,
        PAUSE=waiting.pause_ns,
        TOP_K=top_k,
        **_flags(rank, world, waiting, add, shared, zero_centered),
        num_warps=TILE_WARPS,
        maxnreg=registers(programs, TILE_WARPS),
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
    return bind(
        one_shot_words_kernel,
        WORDS_AT=words_at,
        SLOT=slot,
        BLOCK=next_power_of_2(width // 2),
        TOP_K=top_k,
        PDL=pdl,
        **_flags(rank, world, waiting, add, shared, zero_centered),
        num_warps=word_warps(width),
        maxnreg=registers(WORD_ROWS, WORD_WARPS),
        launch_pdl=pdl,
    )
