"""The beginning of a captured decode step: its indices, from the columns that the host has sent, and its tokens' embeddings."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.launch import cdiv

START_BLOCK = 1024
EMBED_BLOCK = 2048


class StartRows(NamedTuple):
    """Of T rows: `token_ids [T]` int64; `positions`, `slots` and `lengths [T]` int32."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor


def start_rows(
    columns: torch.Tensor, last_tokens: torch.Tensor, tables: torch.Tensor, block_size: int, block_tables: torch.Tensor
) -> StartRows:
    """From `columns [>= 5, T]` int64, contiguous: given token, slot that feeds the row (or -1), position, slot (or -1), length.

    `last_tokens [S]` int64 feed rows; `tables [S, width]` int32 have the slots' blocks, of which those of a row's length go into
    `block_tables [T, width]` int32: what was there behind them stays.
    """
    rows, width = columns.shape[1], tables.shape[1]
    device = columns.device
    positions, slots, lengths = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(3))
    made = StartRows(
        token_ids=torch.empty(rows, dtype=torch.int64, device=device),
        positions=positions,
        slots=slots,
        lengths=lengths,
    )
    _start_kernel[(rows,)](
        columns, last_tokens, tables, *made, block_tables, rows, width, BLOCK_SIZE=block_size, BLOCK=START_BLOCK, num_warps=4
    )
    return made


def embed_rows(token_ids: torch.Tensor, table: torch.Tensor, *, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `token_ids [T]` int64 of `table [V, width]`, `[T, width]`, twice: a residual for layers, and what it began as."""
    if table.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    rows, width = len(token_ids), table.shape[1]
    x, kept = (torch.empty(rows, width, dtype=table.dtype, device=table.device) for _ in range(2))
    if rows:
        _embed_kernel[(rows, cdiv(width, EMBED_BLOCK))](
            token_ids, table, x, kept, table.stride(0), width, BLOCK=EMBED_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
        )
    return x, kept


@triton.jit(do_not_specialize=["rows"])
def _start_kernel(
    columns,
    last_tokens,
    tables,
    token_ids,
    positions,
    slots,
    lengths,
    block_tables,
    rows,
    width,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    given = tl.load(columns + row)
    fed = tl.load(columns + rows + row)
    slot = tl.load(columns + 3 * rows + row)
    length = tl.load(columns + 4 * rows + row)
    last = tl.load(last_tokens + tl.maximum(fed, 0))
    tl.store(token_ids + row, tl.where(fed >= 0, last, given))
    tl.store(positions + row, tl.load(columns + 2 * rows + row).to(tl.int32))
    tl.store(slots + row, slot.to(tl.int32))
    tl.store(lengths + row, length.to(tl.int32))
    blocks = tl.cdiv(length, BLOCK_SIZE).to(tl.int32)
    source = tables + tl.maximum(slot, 0) * width
    target = block_tables + row.to(tl.int64) * width
    for start in range(0, blocks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < blocks, other=0), mask=at < blocks)


@triton.jit
def _embed_kernel(token_ids, table, x, kept, stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(token_ids + row)
    value = tl.load(table + token * stride + at, mask=at < width, other=0.0)
    tl.store(x + row * width + at, value, mask=at < width)
    tl.store(kept + row * width + at, value, mask=at < width)
