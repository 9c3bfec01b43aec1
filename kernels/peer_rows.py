"""Rows that stay with the ranks that own them, through peer memory: which kernel a scatter or gather takes, and its launch.

A few rows go in words (`kernels.owned_words_triton`), more in tiles (`kernels.owned_rows_triton`), by the rule of sums. `owners`,
`[T]` int64, has each row's rank; it is the same on all ranks. Every rank calls, whatever it owns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from kernels.launch import Launch, bind, cdiv, next_power_of_2
from kernels.owned_rows_triton import owned_gather_kernel, owned_scatter_kernel
from kernels.owned_words_triton import owned_gather_words_kernel, owned_scatter_words_kernel
from kernels.pairs import Pairs
from kernels.peer_memory import PROGRAMS, WORD_ROWS, PeerMemory, Waiting
from kernels.peer_sums import PAIRS_PARTS, TILE_WARPS, WORD_WARPS, registers, tile_rows, told_a_call, word_warps


def scatter_add_norm_rows(
    memory: PeerMemory,
    partial: torch.Tensor | Pairs,
    owners: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`kernels.peer_sums.reduce_add_norm_rows` for the rows that this rank owns: of x and of the result no others are written.

    ValueError for rows that are not contiguous or do not fit the memory.
    """
    value, pairs = (partial.value, partial) if isinstance(partial, Pairs) else (partial, None)
    rows, width = partial.shape
    _check(memory, rows, width, x, *(() if pairs else (value,)))
    normed = torch.empty_like(x)
    if rows == 0:
        return normed
    tensors = (
        value,
        None if pairs is None else pairs.experts,
        None if pairs is None else pairs.local,
        owners,
        x,
        shared,
        shared_gate,
        weight,
        normed,
    )
    strides = (0 if shared is None else shared.stride(0), 0 if shared_gate is None else shared_gate.stride(0))
    top_k = 0 if pairs is None else pairs.top_k
    how: tuple[tuple[str, Any], ...] = (("TOP_K", top_k), ("SHARED", shared is not None), ("ZERO_CENTERED", zero_centered))
    if memory.in_words(rows, width, value.dtype):
        launch = _words(owned_scatter_words_kernel, *_words_of(memory), width, pdl, how)
        launch((rows, 1, 1), *tensors, *_in_words(memory), width // 2, *strides, eps)
        return normed
    tile = tile_rows(width, value.dtype)
    how += (("PARTS", 1 if pairs is None else min(PAIRS_PARTS, tile)),)
    launch = _tiles(owned_scatter_kernel, *_tiles_of(memory), width, tile, how)
    launch((min(cdiv(rows, tile), memory.programs), 1, 1), *tensors, *_in_tiles(memory), rows, width, *strides, eps)
    return normed


def gather_add_norm_rows(
    memory: PeerMemory,
    mixed: torch.Tensor,
    owners: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """`x += mixed` in place, rounded, in the rows that this rank owns alone; the RMSNorm of x in all rows, as their owners made it.

    All are `[T, width]`, contiguous. ValueError for rows that are not, or do not fit the memory.
    """
    normed = torch.empty_like(x)
    _gather(memory, normed, owners, pdl, (mixed, x, weight), eps, (("ADD", True), ("ZERO_CENTERED", zero_centered)))
    return normed


def gather_owned_rows(memory: PeerMemory, rows: torch.Tensor, owners: torch.Tensor, *, pdl: bool = False) -> None:
    """Fill the rows of `rows [T, width]` that other ranks own with theirs. ValueError as above."""
    _gather(memory, rows, owners, pdl, (None, None, None), 0.0, (("ADD", False), ("ZERO_CENTERED", False)))


def _gather(memory, normed, owners, pdl, added, eps, how) -> None:
    rows, width = normed.shape
    mixed, x, weight = added
    _check(memory, rows, width, normed, *(() if x is None else (mixed, x)))
    if rows == 0:
        return
    tensors = (mixed, owners, x, weight, normed)
    if memory.in_words(rows, width, normed.dtype):
        launch = _words(owned_gather_words_kernel, *_words_of(memory), width, pdl, how)
        launch((rows, 1, 1), *tensors, *_in_words(memory), width // 2, eps)
        return
    tile = tile_rows(width, normed.dtype)
    launch = _tiles(owned_gather_kernel, *_tiles_of(memory), width, tile, how)
    launch((min(cdiv(rows, tile), memory.programs), 1, 1), *tensors, *_in_tiles(memory), rows, width, eps)


def _check(memory: PeerMemory, rows: int, width: int, *tensors: torch.Tensor) -> None:
    if not memory.fits(rows, width):
        raise ValueError(f"{rows} rows of {width} do not fit {memory.share} elements")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("rows must be contiguous")


def _in_words(memory: PeerMemory) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return memory.buffers, memory.turns[PROGRAMS:], memory.abort


def _in_tiles(memory: PeerMemory) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return memory.buffers, memory.signals, memory.turns, memory.abort


def _words_of(memory: PeerMemory) -> tuple[int, int, int, int, Waiting]:
    return memory.rank, memory.world, memory.words_at, memory.slot, memory.waiting


def _tiles_of(memory: PeerMemory) -> tuple[int, int, int, int, int, int, bool, Waiting]:
    shape = (memory.capacity, memory.share, memory.programs, memory.line)
    return memory.rank, memory.world, *shape, memory.two_shots, memory.waiting


@cache
def _words(
    kernel: Any,
    rank: int,
    world: int,
    words_at: int,
    slot: int,
    waiting: Waiting,
    width: int,
    pdl: bool,
    how: tuple[tuple[str, Any], ...],
) -> Launch:
    return bind(
        kernel,
        RANK=rank,
        WORLD=world,
        WORDS_AT=words_at,
        SLOT=slot,
        BLOCK=next_power_of_2(width // 2),
        SPINS=waiting.spins,
        READER=waiting.reader,
        PDL=pdl,
        **dict(how),
        num_warps=word_warps(width),
        maxnreg=registers(WORD_ROWS, WORD_WARPS),
        launch_pdl=pdl,
    )


@cache
def _tiles(
    kernel: Any,
    rank: int,
    world: int,
    capacity: int,
    share: int,
    programs: int,
    line: int,
    two_shots: bool,
    waiting: Waiting,
    width: int,
    tile: int,
    how: tuple[tuple[str, Any], ...],
) -> Launch:
    constants = dict(how)
    return bind(
        kernel,
        RANK=rank,
        WORLD=world,
        CAPACITY=capacity,
        PROGRAMS=programs,
        TILES=told_a_call(share, width, tile, programs, two_shots),
        ROWS=tile // constants.get("PARTS", 1),
        BLOCK=next_power_of_2(width),
        SHARE=share,
        LINE=line,
        SPINS=waiting.spins,
        PAUSE=waiting.pause_ns,
        READER=waiting.reader,
        **constants,
        num_warps=TILE_WARPS,
        maxnreg=registers(programs, TILE_WARPS),
    )
