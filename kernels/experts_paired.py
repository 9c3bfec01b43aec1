"""Experts for one row, or a few: every (row, choice) pair reads its expert's weights itself; two launches, nothing is grouped.

Shape letters as in `kernels.experts`. Products run on the ordinary arithmetic units, weights stream through registers. Where two
rows chose one expert, its weights are read twice, the second time from the L2 cache: pairs are the fast dimension of the grid.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.experts_config import Tile
from kernels.launch import cdiv, next_power_of_2

UNROLLED = 4
"""Steps of the loop over H that are unrolled where it is not pipelined through shared memory, so that their loads overlap."""


def gate_up_paired(
    x: torch.Tensor, experts: torch.Tensor, local: torch.Tensor, gate_up: torch.Tensor, tile: Tile, *, pdl: bool
) -> torch.Tensor:
    """Units `[P, I]` float32 of every pair whose expert is held here; other rows are left unwritten."""
    pairs, units = experts.numel(), gate_up.shape[1] // 2
    out = torch.empty(pairs, units, dtype=torch.float32, device=x.device)
    _gate_up_paired_kernel[(pairs * cdiv(units, tile.block_n),)](
        x,
        experts,
        local,
        gate_up,
        out,
        pairs,
        experts.shape[1],
        x.shape[1],
        units,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        STAGES=tile.stages,
        UNROLL=UNROLLED if tile.stages == 1 else 1,
        EVEN_K=x.shape[1] % tile.block_k == 0,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
    return out


def down_paired(
    units: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    local: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    *,
    pdl: bool,
) -> None:
    """The weighted sums of every row over its choices, always added in one order, into out `[T, H]`.

    The weights of `tile.block_m` choices that are held here are read at once; `tile.stages` is unused.
    """
    rows, top_k = experts.shape
    hidden, width = down.shape[1:]
    _down_paired_kernel[(rows * cdiv(hidden, tile.block_n),)](
        units,
        experts,
        weights,
        local,
        down,
        out,
        hidden,
        width,
        TOP_K=top_k,
        TOP_K_POW2=next_power_of_2(top_k),
        SLOTS=min(tile.block_m, next_power_of_2(top_k)),
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        K_TILES=cdiv(width, tile.block_k),
        EVEN_K=width % tile.block_k == 0,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["pairs", "top_k"])
def _gate_up_paired_kernel(
    x,
    experts,
    local,
    gate_up,
    out,
    pairs,
    top_k,
    hidden,
    units,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    pair = tl.program_id(0) % pairs
    unit = tl.program_id(0) // pairs * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(local + tl.load(experts + pair)).to(tl.int64)
    if expert < 0:
        return
    at = tl.arange(0, BLOCK_K)
    row = x + (pair // top_k).to(tl.int64) * hidden
    gate_at = gate_up + (expert * 2 * units + unit[:, None]) * hidden
    up_at = gate_at + units.to(tl.int64) * hidden
    live = (unit < units)[:, None]
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, hidden, BLOCK_K, num_stages=STAGES, loop_unroll_factor=UNROLL):
        k = start + at
        if EVEN_K:
            part = tl.load(row + k).to(tl.float32)[None, :]
            mask = live
        else:
            part = tl.load(row + k, mask=k < hidden, other=0.0).to(tl.float32)[None, :]
            mask = live & (k < hidden)[None, :]
        gate += tl.load(gate_at + k[None, :], mask=mask, other=0.0).to(tl.float32) * part
        up += tl.load(up_at + k[None, :], mask=mask, other=0.0).to(tl.float32) * part
    g = tl.sum(gate, 1)
    tl.store(out + pair * units + unit, g * tl.sigmoid(g) * tl.sum(up, 1), mask=unit < units)


@triton.jit
def _at_slots(value, here):
    """Of each slot (row of `here`) the value of the only choice, or none, that is there."""
    return tl.sum(tl.where(here, value[None, :], tl.zeros_like(value)[None, :]), 1)


@triton.jit
def _down_paired_kernel(
    units,
    experts,
    weights,
    local,
    down,
    out,
    hidden,
    width,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_TILES: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles = tl.cdiv(hidden, BLOCK_N)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    choice = tl.arange(0, TOP_K_POW2)
    pair = row * TOP_K + choice
    # What the router wrote is read past L1, where a line of an earlier layer might be: this is before the wait.
    chosen = tl.load(experts + pair, mask=choice < TOP_K, other=0, cache_modifier=".cg")
    expert = tl.load(local + chosen, mask=choice < TOP_K, other=-1).to(tl.int32)
    weight = tl.load(weights + pair, mask=choice < TOP_K, other=0.0, cache_modifier=".cg")
    number = tl.cumsum((expert >= 0).to(tl.int32), 0) - 1
    count = tl.max(number, 0) + 1
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first in tl.static_range(0, TOP_K, SLOTS):
        # Held choices, in their order, are a dimension of the tile: their weights are asked for at once, foreign ones take no room.
        if first == 0 or first < count:
            slot = first + tl.arange(0, SLOTS)
            held = slot < count
            here = (number[None, :] == slot[:, None]) & (expert >= 0)[None, :]
            mine = _at_slots(expert, here).to(tl.int64)
            factor = _at_slots(weight, here)
            place = units + (row * TOP_K + _at_slots(choice, here)) * width
            line = down + (mine[None, :] * hidden + column[:, None]) * width
            line_held = held[None, :] & (column < hidden)[:, None]
            for tile in tl.static_range(K_TILES):
                k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
                mask, part_mask = line_held[:, :, None], held[:, None]
                if not EVEN_K:
                    mask = mask & (k < width)[None, None, :]
                    part_mask = part_mask & (k < width)[None, :]
                # Told so, the compiler shares columns out to warps, not choices, whose sum then needs no other thread.
                at = tl.max_contiguous(line[:, :, None] + k[None, None, :], [2, 1, BLOCK_K])
                w = tl.load(at, mask=mask, other=0.0)
                if PDL and tile == 0 and first == 0:
                    # The first weights are on their way while the kernel before this one ends. It let this one start only after it
                    # had waited for the router's, so choices and their weights are complete; its own output is complete from here.
                    tl.extra.cuda.gdc_wait()
                    tl.extra.cuda.gdc_launch_dependents()
                part = tl.load(place[:, None] + k[None, :], mask=part_mask, other=0.0) * factor[:, None]
                total += tl.sum(w.to(tl.float32) * part[None, :, :], 1)
    sums = tl.sum(total, 1)
    tl.store(out + row * hidden + column, sums.to(out.dtype.element_ty), mask=column < hidden)
