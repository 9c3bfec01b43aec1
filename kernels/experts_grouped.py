"""Experts over blocks of grouped pairs: gate and up with the activation, down, and the sum over a row's choices.

Shape letters as in `kernels.experts` and `kernels.grouping`. A grid covers the most blocks that its shape can make; programs past
the blocks that exist end at once. Products accumulate in float32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.experts_config import Tile
from kernels.grouping import Groups, block_of
from kernels.launch import Launch, bind, cdiv, next_power_of_2
from kernels.pairs import Pairs

COMBINE_COLUMNS = 1024


def gate_up_grouped(x: torch.Tensor, gate_up: torch.Tensor, groups: Groups, top_k: int, tile: Tile, *, pdl: bool) -> torch.Tensor:
    """Units `silu(gate x) * (up x)` `[P, I]` in x's dtype, in the order of `groups`; rows past its pairs are unwritten."""
    hidden, units = x.shape[1], gate_up.shape[1] // 2
    out = torch.empty(groups.pairs, units, dtype=x.dtype, device=x.device)
    _gate_up(tile, x.dtype, hidden, pdl)(
        (groups.most_blocks * cdiv(units, tile.block_n), 1, 1),
        x,
        _weights(gate_up, tile),
        out,
        groups.meta,
        groups.held,
        groups.most_blocks,
        top_k,
        hidden,
        units,
    )
    return out


def down_grouped(
    units: torch.Tensor, weights: torch.Tensor, down: torch.Tensor, groups: Groups, tile: Tile, *, pdl: bool
) -> torch.Tensor:
    """`[P, H]` in units' dtype: each pair's product times its weight, at the pair's own number; foreign pairs are unwritten."""
    hidden, width = down.shape[1:]
    out = torch.empty(groups.pairs, hidden, dtype=units.dtype, device=units.device)
    _down(tile, units.dtype, width, pdl)(
        (groups.most_blocks * cdiv(hidden, tile.block_n), 1, 1),
        units,
        weights,
        _weights(down, tile),
        out,
        groups.meta,
        groups.held,
        groups.most_blocks,
        hidden,
        width,
    )
    return out


def combine(pairs: torch.Tensor, experts: torch.Tensor, local: torch.Tensor, out: torch.Tensor, *, pdl: bool) -> None:
    """Sum `pairs [P, H]` over each row's choices, in their order and in float32, into out `[T, H]`; foreign pairs are left out."""
    rows, top_k = experts.shape
    hidden = out.shape[1]
    columns = min(COMBINE_COLUMNS, next_power_of_2(hidden))
    _combine(top_k, columns, pdl)((rows, cdiv(hidden, columns), 1), pairs, experts, local, out, hidden)


@cache
def _combine(top_k: int, columns: int, pdl: bool) -> Launch:
    return bind(_combine_kernel, TOP_K=top_k, COLUMNS=columns, PDL=pdl, num_warps=4, launch_pdl=pdl)


def sum_pairs(pairs: Pairs, *, pdl: bool = False) -> torch.Tensor:
    """The sums `[T, H]` of pairs over each row's choices, in their dtype."""
    out = torch.empty(pairs.shape, dtype=pairs.value.dtype, device=pairs.value.device)
    combine(pairs.value, pairs.experts, pairs.local, out, pdl=pdl)
    return out


def _weights(weights: torch.Tensor, tile: Tile) -> Any:
    if not tile.descriptors:
        return weights
    return TensorDescriptor.from_tensor(weights.view(-1, weights.shape[-1]), [tile.block_n, tile.block_k])


@cache
def _gate_up(tile: Tile, dtype: torch.dtype, depth: int, pdl: bool) -> Launch:
    return bind(_gate_up_kernel, **_options(tile, dtype, depth, pdl))


@cache
def _down(tile: Tile, dtype: torch.dtype, depth: int, pdl: bool) -> Launch:
    return bind(_down_kernel, **_options(tile, dtype, depth, pdl))


def _options(tile: Tile, dtype: torch.dtype, depth: int, pdl: bool) -> dict[str, Any]:
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "EVEN_K": depth % tile.block_k == 0,
        "SWAP": tile.swap,
        "DESCRIPTORS": tile.descriptors,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "PDL": pdl,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "launch_pdl": pdl,
    }


@triton.jit
def _product(rows, weights, total, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """total + rows `[M, K]` weights `[N, K]`^T, `[M, N]`, or its transpose when SWAP."""
    if SWAP:
        return tl.dot(weights, rows.T, total, input_precision=PRECISION)
    else:
        return tl.dot(rows, weights.T, total, input_precision=PRECISION)


@triton.jit
def _weight_tile(weights, row, rows, k, start, depth, EVEN_K: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """`[N, K]` of weights whose rows are `depth` long: N rows from `row`, columns `start + k`."""
    if DESCRIPTORS:
        return weights.load([row.to(tl.int32), start])
    else:
        at = weights + (row + rows.to(tl.int64))[:, None] * depth + (start + k)[None, :]
        if EVEN_K:
            return tl.load(at)
        else:
            return tl.load(at, mask=(start + k < depth)[None, :], other=0.0)


@triton.jit
def _row_tile(at, live, k, start, depth, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(at + start + k[None, :], mask=live[:, None], other=0.0)
    else:
        return tl.load(at + start + k[None, :], mask=live[:, None] & (start + k < depth)[None, :], other=0.0)


@triton.jit(do_not_specialize=["held", "most_blocks", "top_k"])
def _gate_up_kernel(
    x,
    gate_up,
    out,
    meta,
    held,
    most_blocks,
    top_k,
    hidden,
    units,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles = tl.cdiv(units, BLOCK_N)
    block, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if block >= tl.load(meta):
        return
    expert, start, rows, listed = block_of(meta, block, held, most_blocks)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    live = m < rows
    pair = tl.load(listed + start + m, mask=live, other=0)
    at = x + (pair // top_k).to(tl.int64)[:, None] * hidden
    # Units past the last read the last one again, and are not stored.
    unit = tl.minimum(first + n, units - 1) - first
    gate_row = expert * 2 * units + first
    if SWAP:
        gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for depth in range(0, hidden, BLOCK_K):
        part = _row_tile(at, live, k, depth, hidden, EVEN_K)
        w = _weight_tile(gate_up, gate_row, unit, k, depth, hidden, EVEN_K, DESCRIPTORS)
        gate = _product(part, w, gate, SWAP, PRECISION)
        w = _weight_tile(gate_up, gate_row + units, unit, k, depth, hidden, EVEN_K, DESCRIPTORS)
        up = _product(part, w, up, SWAP, PRECISION)
    active = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    if SWAP:
        active = active.T
    to = out + (start + m).to(tl.int64)[:, None] * units + (first + n)[None, :]
    tl.store(to, active, mask=live[:, None] & (first + n < units)[None, :])


@triton.jit(do_not_specialize=["held", "most_blocks"])
def _down_kernel(
    units,
    weights,
    down,
    out,
    meta,
    held,
    most_blocks,
    hidden,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles = tl.cdiv(hidden, BLOCK_N)
    block, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK_N
    # The kernel before this one waited for the groups: they are complete. They are read past L1, where an earlier layer's might be.
    # Its own output is complete after the wait.
    if block >= tl.load(meta, cache_modifier=".cg"):
        if PDL:
            # A kernel none of whose programs waits could end before the one in front of it.
            tl.extra.cuda.gdc_wait()
        return
    expert, start, rows, listed = block_of(meta, block, held, most_blocks)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    live = m < rows
    pair = tl.load(listed + start + m, mask=live, other=0, cache_modifier=".cg").to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = units + (start + m).to(tl.int64)[:, None] * width
    column = tl.minimum(first + n, hidden - 1) - first
    if SWAP:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for depth in range(0, width, BLOCK_K):
        part = _row_tile(at, live, k, depth, width, EVEN_K)
        w = _weight_tile(down, expert * hidden + first, column, k, depth, width, EVEN_K, DESCRIPTORS)
        total = _product(part, w, total, SWAP, PRECISION)
    if SWAP:
        total = total.T
    total *= tl.load(weights + pair, mask=live, other=0.0)[:, None]
    to = out + pair[:, None] * hidden + (first + n)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=live[:, None] & (first + n < hidden)[None, :])


@triton.jit
def _combine_kernel(pairs, experts, local, out, hidden, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = row * TOP_K + choice
        end = tl.where(tl.load(local + tl.load(experts + pair, cache_modifier=".cg")) >= 0, hidden, 0)
        if PDL and choice == 0:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        total += tl.load(pairs + pair * hidden + column, mask=column < end, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, total.to(out.dtype.element_ty), mask=column < hidden)
