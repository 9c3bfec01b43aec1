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

UNROLLED = 4
"""Steps of the loop over H that are unrolled where it is not pipelined through shared memory, so that their loads overlap."""


def gate_up_paired(
    x: torch.Tensor, experts: torch.Tensor, local: torch.Tensor, gate_up: torch.Tensor, tile: Tile, *, pdl: bool
) -> torch.Tensor:
    """Units `[P, I]` float32 of every pair whose expert is held here; other rows are left unwritten."""
    pairs, units = experts.numel(), gate_up.shape[1] // 2
    out = torch.empty(pairs, units, dtype=torch.float32, device=x.device)
    _gate_up_paired_kernel[(pairs * triton.cdiv(units, tile.block_n),)](
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
    """The weighted sums of every row over its choices, always added in one order, into out `[T, H]`. `tile.stages` is unused."""
    rows, top_k = experts.shape
    hidden, width = down.shape[1:]
    _down_paired_kernel[(rows * triton.cdiv(hidden, tile.block_n),)](
        units,
        experts,
        weights,
        local,
        down,
        out,
        hidden,
        width,
        TOP_K=top_k,
        TOP_K_POW2=triton.next_power_of_2(top_k),
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        K_TILES=triton.cdiv(width, tile.block_k),
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_TILES: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles = tl.cdiv(hidden, BLOCK_N)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = row * TOP_K + tl.arange(0, TOP_K_POW2)
    live = tl.arange(0, TOP_K_POW2) < TOP_K
    # The choices are a dimension of the tile: all their weights are asked for at once, and nothing is read for foreign ones.
    expert = tl.load(local + tl.load(experts + pair, mask=live, other=0), mask=live, other=-1).to(tl.int64)
    held = (expert >= 0)[:, None]
    weight = tl.load(weights + pair, mask=live, other=0.0)[:, None]
    line = down + (expert[:, None] * hidden + column[None, :]) * width
    line_held = held & (column < hidden)[None, :]
    total = tl.zeros([TOP_K_POW2, BLOCK_N, BLOCK_K], tl.float32)
    for tile in tl.static_range(K_TILES):
        k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = line_held[:, :, None]
        if not EVEN_K:
            mask = mask & (k < width)[None, None, :]
        w = tl.load(line[:, :, None] + k[None, None, :], mask=mask, other=0.0)
        if PDL and tile == 0:
            # The first weights are on their way while the kernel before this one ends. It let this one start only after it had
            # waited for the router's, so choices and their weights are complete; its own output is complete from here on.
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        part = tl.load(units + pair[:, None] * width + k[None, :], mask=held & (k < width)[None, :], other=0.0) * weight
        total += w.to(tl.float32) * part[:, None, :]
    sums = tl.sum(tl.sum(total, 2), 0)
    tl.store(out + row * hidden + column, sums.to(out.dtype.element_ty), mask=column < hidden)
