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
    """The weighted sums of every row over its choices, in their order, into out `[T, H]`."""
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
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        K_TILES=triton.cdiv(width, tile.block_k),
        STAGES=tile.stages,
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
    for start in tl.range(0, hidden, BLOCK_K, num_stages=STAGES):
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles = tl.cdiv(hidden, BLOCK_N)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.range(0, TOP_K * K_TILES, num_stages=STAGES):
        pair = row * TOP_K + step // K_TILES
        k = step % K_TILES * BLOCK_K + at
        expert = tl.load(local + tl.load(experts + pair)).to(tl.int64)
        # A foreign expert's tile is empty: nothing is read.
        depth = tl.where(expert >= 0, width, 0)
        part = tl.load(units + pair * width + k, mask=k < depth, other=0.0) * tl.load(weights + pair)
        w_at = down + (expert * hidden + column[:, None]) * width + k[None, :]
        if EVEN_K:
            w = tl.load(w_at, mask=(column < tl.where(expert >= 0, hidden, 0))[:, None], other=0.0)
        else:
            w = tl.load(w_at, mask=(column < hidden)[:, None] & (k < depth)[None, :], other=0.0)
        total += w.to(tl.float32) * part[None, :]
    tl.store(out + row * hidden + column, tl.sum(total, 1).to(out.dtype.element_ty), mask=column < hidden)
