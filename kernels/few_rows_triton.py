"""Linear layers of few rows on the GPU: weights are on their way, or here, before the kernel in front of this one has ended.

The same product as `kernels.few_rows`, which is the specification. A decode step's linear layers take as long as their weights need
to arrive; the kernels between them leave memory idle. With programmatic dependent launch a program starts under the kernel before
it and asks for its weights, which no kernel writes, and only then waits for its input.

Shape letters: T rows, K depth, N columns of the result, R rows of a tile, P parts of the depth in a program.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.few_rows import MOST_ROWS, FewRowsConfig
from kernels.launch import cdiv, next_power_of_2

LINE_BYTES = 128
"""What one prefetch brings to the L2 cache."""


def linear_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: FewRowsConfig,
    turns: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """`x [T, K] @ weight [N, K]^T + bias [N]` -> `[T, N]`, for T up to MOST_ROWS; rows of x may be strided, the weight may not.

    `turns`, int32, at least as many as there are tiles of columns, is zero before and after: programs that share a sum count
    themselves in it. Launches that share it must not overlap but for the part of a dependent one before its wait.
    """
    rows, depth = x.shape
    columns = weight.shape[0]
    if rows > MOST_ROWS or weight.shape[1] != depth or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"{tuple(x.shape)} x {tuple(weight.shape)}: at most {MOST_ROWS} rows, all of them contiguous")
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    options: dict[str, Any] = {"PDL": pdl, "num_warps": config.warps, "num_stages": config.stages, "launch_pdl": pdl}
    tiles = cdiv(columns, config.block_n)
    if config.way == "rows":
        options |= {"BLOCK_N": config.block_n, "BLOCK_K": next_power_of_2(depth)}
        _rows_kernel[(tiles,)](x, weight, bias, out, x.stride(0), columns, depth, rows, **options)
        return out
    block_k = config.block_k
    block_rows = config.block_rows or max(8, next_power_of_2(rows))
    steps = cdiv(depth, block_k)
    splits = min(config.splits, steps)
    share = cdiv(steps, splits) * block_k
    sums = torch.empty(splits, rows, columns, dtype=torch.float32, device=x.device) if splits > 1 else out
    _dot_kernel[(tiles, cdiv(rows, block_rows), splits)](
        *(x, weight, bias, out, sums, turns),
        *(x.stride(0), rows, columns, depth, share),
        ROWS=block_rows,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        PARTS=config.parts,
        SPLITS=splits,
        SWAP=config.block_rows == 0,
        HELD=share == block_k,
        EVEN_K=depth % block_k == 0,
        LINE=LINE_BYTES // x.element_size(),
        LINES=next_power_of_2(cdiv(share, LINE_BYTES // x.element_size())),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **options,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _rows_kernel(
    x,
    weight,
    bias,
    out,
    stride,
    columns,
    depth,
    rows,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    here = column < columns
    w = tl.load(weight + column.to(tl.int64)[:, None] * depth + k[None, :], mask=here[:, None] & (k < depth)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for row in range(rows):
        part = tl.load(x + row * stride + k, mask=k < depth, other=0.0).to(tl.float32)
        total = tl.sum(w.to(tl.float32) * part[None, :], 1)
        if bias is not None:
            total += tl.load(bias + column, mask=here, other=0.0).to(tl.float32)
        tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=here)


@triton.jit
def _tile(start, line, live, k, depth, PARTS: tl.constexpr, EVEN_K: tl.constexpr):
    """Of lines `[N]`, offsets from `start`, the elements at places `k`: `[N, K]` for `[K]`, or `[P, N, K / P]` for `[P, K / P]`."""
    if PARTS > 1:
        at = start + line[None, :, None] + k[:, None, :]
        mask = live[None, :, None] if EVEN_K else live[None, :, None] & (k < depth)[:, None, :]
    else:
        at = start + line[:, None] + k[None, :]
        mask = live[:, None] if EVEN_K else live[:, None] & (k < depth)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _product(w, part, total, PARTS: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """total + w part^T, `[P, N, R]`; without P where it is 1, since matrices multiply faster than stacks: `[N, R]` or `[R, N]`."""
    if PARTS > 1:
        return tl.dot(w, part.permute(0, 2, 1), total, input_precision=PRECISION)
    elif SWAP:
        return tl.dot(w, part.T, total, input_precision=PRECISION)
    else:
        return tl.dot(part, w.T, total, input_precision=PRECISION)


@triton.jit
def _ask_for(weight, w_line, first, last, LINE: tl.constexpr, LINES: tl.constexpr):
    """Bring the elements `first .. last - 1` of some lines to the L2 cache."""
    ahead = tl.minimum(first + tl.arange(0, LINES) * LINE, last - 1)
    line = weight + w_line[:, None] + ahead[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _nothing_yet(PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr):
    """Places of a step's depth, and a total of zero, both in the shapes that `_tile` and `_product` take."""
    if PARTS > 1:
        k = tl.arange(0, PARTS)[:, None] * (BLOCK_K // PARTS) + tl.arange(0, BLOCK_K // PARTS)[None, :]
        return k, tl.zeros([PARTS, BLOCK_N, ROWS], tl.float32)
    elif SWAP:
        return tl.arange(0, BLOCK_K), tl.zeros([BLOCK_N, ROWS], tl.float32)
    else:
        return tl.arange(0, BLOCK_K), tl.zeros([ROWS, BLOCK_N], tl.float32)


@triton.jit
def _sum_of_splits(sums, to, here, rows, columns, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr):
    """The totals of all programs that share a tile, in their order."""
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for other in tl.static_range(SPLITS):
        total += tl.load(sums + tl.cast(other, tl.int64) * rows * columns + to, mask=here, other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["rows"])
def _dot_kernel(
    x, weight, bias, out, sums, turns, stride, rows, columns, depth, share,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    SWAP: tl.constexpr, HELD: tl.constexpr, EVEN_K: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(2)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = split * share
    last = tl.minimum(first + share, depth)
    # Columns past the last read the last one again, and are not stored.
    w_line, x_line = tl.minimum(column, columns - 1).to(tl.int64) * depth, row * stride
    every = tl.full([BLOCK_N], True, tl.int1)
    live = row < rows
    k, total = _nothing_yet(PARTS, ROWS, BLOCK_N, BLOCK_K, SWAP)
    if HELD:
        w = _tile(weight, w_line, every, first + k, depth, PARTS, EVEN_K)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        part = _tile(x, x_line, live, first + k, depth, PARTS, EVEN_K)
        total = _product(w, part, total, PARTS, SWAP, PRECISION)
    else:
        if PDL:
            _ask_for(weight, w_line, first, last, LINE, LINES)
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        for start in tl.range(first, last, BLOCK_K):
            w = _tile(weight, w_line, every, start + k, depth, PARTS, EVEN_K)
            part = _tile(x, x_line, live, start + k, depth, PARTS, EVEN_K)
            total = _product(w, part, total, PARTS, SWAP, PRECISION)
    if PARTS > 1:
        total = tl.sum(total, 0)
    elif not SWAP:
        total = total.T
    to = row[None, :].to(tl.int64) * columns + column[:, None]
    here = (row < rows)[None, :] & (column < columns)[:, None]
    if SPLITS > 1:
        tl.store(sums + split.to(tl.int64) * rows * columns + to, total, mask=here)
        tl.debug_barrier()
        turn = turns + tl.program_id(1) * tl.num_programs(0) + tile
        if tl.atomic_add(turn, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(turn, 0)
        total = _sum_of_splits(sums, to, here, rows, columns, BLOCK_N, ROWS, SPLITS)
    if bias is not None:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=here)
