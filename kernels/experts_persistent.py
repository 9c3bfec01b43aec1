"""Experts over blocks of grouped pairs for many rows: programs that stay, and take tiles of the product in turn.

The same sums as `kernels.experts_grouped`, for shapes where the matrix units are the limit. The loops over tiles and over the depth
are one loop to the compiler (`flatten`), so that loads of the next tile are under way while one is stored. Weights come through the
tensor memory accelerator, gate and up side by side as one operand of the widest instruction, and so do the units, whose rows lie in
the order of groups. Tiles of a block follow each other: programs at work share its rows and its expert's weights in the cache.
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
from kernels.launch import Launch, bind, cdiv


def gate_up_persistent(
    x: torch.Tensor, gate_up: torch.Tensor, groups: Groups, top_k: int, tile: Tile, *, pdl: bool
) -> torch.Tensor:
    """As `gate_up_grouped`. Rows of `gate_up` are multiples of 16 bytes."""
    hidden, units = x.shape[1], gate_up.shape[1] // 2
    out = torch.empty(groups.pairs, units, dtype=x.dtype, device=x.device)
    weights = gate_up.view(groups.held, 2, units, hidden)
    _gate_up(tile, x.dtype, hidden, pdl)(
        _grid(x.device, tile, groups, units),
        x,
        TensorDescriptor.from_tensor(weights, [1, 2, tile.block_n, tile.block_k]),
        out,
        groups.meta,
        groups.held,
        groups.most_blocks,
        top_k,
        hidden,
        units,
    )
    return out


def down_persistent(
    units: torch.Tensor, weights: torch.Tensor, down: torch.Tensor, groups: Groups, tile: Tile, *, pdl: bool
) -> torch.Tensor:
    """As `down_grouped`. Rows of `units` and `down` are multiples of 16 bytes."""
    hidden, width = down.shape[1:]
    out = torch.empty(groups.pairs, hidden, dtype=units.dtype, device=units.device)
    _down(tile, units.dtype, width, pdl)(
        _grid(units.device, tile, groups, hidden),
        TensorDescriptor.from_tensor(units, [tile.block_m, tile.block_k]),
        weights,
        TensorDescriptor.from_tensor(down, [1, tile.block_n, tile.block_k]),
        out,
        groups.meta,
        groups.held,
        groups.most_blocks,
        hidden,
    )
    return out


def _grid(device: torch.device, tile: Tile, groups: Groups, outputs: int) -> tuple[int, int, int]:
    """No more programs than run at once, or than there may be tiles."""
    return min(tile.persistent * _multiprocessors(device), groups.most_blocks * cdiv(outputs, tile.block_n)), 1, 1


@cache
def _multiprocessors(device: torch.device) -> int:
    """Those of the device; two for the interpreter, so that programs take turns."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def _gate_up(tile: Tile, dtype: torch.dtype, depth: int, pdl: bool) -> Launch:
    return bind(_gate_up_kernel, **_options(tile, dtype, depth, pdl))


@cache
def _down(tile: Tile, dtype: torch.dtype, depth: int, pdl: bool) -> Launch:
    return bind(_down_kernel, **_options(tile, dtype, depth, pdl))


def _options(tile: Tile, dtype: torch.dtype, depth: int, pdl: bool) -> dict[str, Any]:
    return {
        "STEPS": cdiv(depth, tile.block_k),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.stages,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "PDL": pdl,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "launch_pdl": pdl,
    }


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
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tiles = tl.cdiv(units, BLOCK_N)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # A total that the loop carries, set to zero after each tile: one made in the loop would keep the loops apart.
    total = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.load(meta) * tiles, tl.num_programs(0), flatten=True, num_stages=STAGES):
        block, first = tile // tiles, tile % tiles * BLOCK_N
        expert, start, rows, listed = block_of(meta, block, held, most_blocks)
        live = m < rows
        pair = tl.load(listed + start + m, mask=live, other=0)
        at = x + (pair // top_k).to(tl.int64)[:, None] * hidden
        for step in range(STEPS):
            depth = step * BLOCK_K
            part = tl.load(at + (depth + k)[None, :], mask=live[:, None] & (depth + k < hidden)[None, :], other=0.0)
            w = gate_up.load([expert.to(tl.int32), 0, first, depth]).reshape(2 * BLOCK_N, BLOCK_K)
            total = tl.dot(part, w.T, total, input_precision=PRECISION)
        gate, up = total.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        active = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
        to = out + (start + m).to(tl.int64)[:, None] * units + (first + n)[None, :]
        tl.store(to, active, mask=live[:, None] & (first + n < units)[None, :])
        total = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)


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
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tiles = tl.cdiv(hidden, BLOCK_N)
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.load(meta) * tiles, tl.num_programs(0), flatten=True, num_stages=STAGES):
        block, first = tile // tiles, tile % tiles * BLOCK_N
        expert, start, rows, listed = block_of(meta, block, held, most_blocks)
        for step in range(STEPS):
            depth = step * BLOCK_K
            # Rows past the block's are another's, or nobody's: their products are not stored.
            part = units.load([start, depth])
            w = down.load([expert.to(tl.int32), first, depth]).reshape(BLOCK_N, BLOCK_K)
            total = tl.dot(part, w.T, total, input_precision=PRECISION)
        live = m < rows
        pair = tl.load(listed + start + m, mask=live, other=0).to(tl.int64)
        total *= tl.load(weights + pair, mask=live, other=0.0)[:, None]
        to = out + pair[:, None] * hidden + (first + n)[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=live[:, None] & (first + n < hidden)[None, :])
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
