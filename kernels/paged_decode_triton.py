"""Paged attention on the GPU for one new row, or a few, of many sequences: split over the sequence.

The same function as `kernels.paged_attention.decode_attention`, which is the specification, and `piece_attention` of a few rows
(verification). A program takes one part of one sequence for all query heads of a key/value head: every key and value is read once.
Parts are equal shares of each sequence's own length, so long and short sequences balance; the partial sums are combined in order of
the parts, by a second kernel or by whichever program of a head ends last. Shapes alone decide the grid.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, bind, next_power_of_2

MOST_ROWS = 16
"""Most new rows of one sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """`tile` positions a step of a program, `splits` parts of a sequence, and how the compiler schedules it."""

    tile: int = 64
    splits: int = 1
    warps: int = 4
    stages: int = 3


def default_decode_config(
    spans: int, kv_heads: int, head_dim: int, max_seq: int, dtype: torch.dtype = torch.bfloat16
) -> DecodeConfig:
    """Enough parts for about two programs a multiprocessor, none shorter than two tiles of the longest sequence."""
    tile = 64 if head_dim * dtype.itemsize <= 256 else 32
    wanted = -(-256 // (spans * kv_heads))
    return DecodeConfig(tile=tile, splits=max(1, min(wanted, -(-max_seq // (2 * tile)), 64)))


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seq: int,
    window: int | None = None,
    gate: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    query_start: torch.Tensor | None = None,
    spans: torch.Tensor | None = None,
    max_rows: int = 1,
    turns: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Attention of the last rows of sequences: q `[T, heads, head_dim]` -> `[T, heads * head_dim]` in q's dtype.

    Row s is span s's unless `query_start [S + 1]` says which rows are (at most `max_rows` of each); `spans` [n] names the spans to
    take, every one when None. block_tables `[S, B]` int32, seq_lens `[S]` int32; `max_seq` bounds them on the host. A span of
    length 0 is idle: it reads no cache and its row becomes zeros. Caches `[N, P, kv_heads, head_dim]`, P a multiple of 16. `gate`
    `[T, heads * head_dim]` (rows may be strided): the output is multiplied by its sigmoid. Rows of other spans are left as they are
    in `out`. `turns` int32, one zero for each (span, key/value head), zero again afterwards, saves the second launch.
    """
    rows, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    count = seq_lens.shape[0] if spans is None else spans.shape[0]
    check_attention(q, k_cache, v_cache, block_tables, gate)
    if not 1 <= max_rows <= MOST_ROWS or (query_start is None and (spans is not None or max_rows > 1)):
        raise ValueError(f"{max_rows} rows a span; at most {MOST_ROWS}, and more than one or chosen spans need query_start")
    if out is None:
        out = torch.empty(rows, heads * head_dim, dtype=q.dtype, device=q.device)
    if count == 0:
        return out
    config = config or default_decode_config(count, kv_heads, head_dim, max_seq, q.dtype)
    if turns is not None and turns.numel() < count * kv_heads:
        raise ValueError(f"{turns.numel()} turns for {count} spans of {kv_heads} heads")
    packed = _packed(heads, kv_heads, max_rows)
    splits = config.splits
    partial = stats = None
    if splits > 1:
        partial = torch.empty(count, kv_heads, splits, packed, head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(count, kv_heads, 2, splits, packed, dtype=torch.float32, device=q.device)
    gate_stride = 0 if gate is None else gate.stride(0)
    combined = splits == 1 or turns is not None
    shape = (config.tile, heads, kv_heads, head_dim, max_rows, window)
    _decode(config.warps, config.stages, splits > 1, combined, block_size, q.dtype, *shape)(
        (splits, kv_heads, count),
        *(q, k_cache, v_cache, block_tables, seq_lens, query_start, spans, gate, out, partial, stats),
        turns if splits > 1 else None,
        block_tables.stride(0),
        gate_stride,
        splits,
        math.log2(math.e) / math.sqrt(head_dim),
    )
    if not combined:
        grid = (heads // kv_heads * max_rows, kv_heads, count)
        launch = _combine(next_power_of_2(splits), *shape)
        launch(grid, seq_lens, query_start, spans, gate, out, partial, stats, gate_stride, splits)
    return out


def _packed(heads: int, kv_heads: int, max_rows: int) -> int:
    """(head, row) pairs of a program, no less than a matrix product takes."""
    return max(16, next_power_of_2(heads // kv_heads * max_rows))


def _shape(tile: int, heads: int, kv_heads: int, head_dim: int, max_rows: int, window: int | None) -> dict[str, int]:
    packed = _packed(heads, kv_heads, max_rows)
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "MAX_ROWS": max_rows}
    return sizes | {"PACKED": packed, "TILE": tile, "WINDOW": window or 0}


@cache
def _decode(warps: int, stages: int, split: bool, combined: bool, block_size: int, dtype: torch.dtype, *shape: Any) -> Launch:
    return bind(
        _decode_kernel,
        SPLIT=split,
        BLOCK_SIZE=block_size,
        IN_TURN=combined,
        PRECISION="tf32x3" if dtype == torch.float32 else "tf32",
        **_shape(*shape),
        num_warps=warps,
        num_stages=stages,
    )


@cache
def _combine(splits_pow2: int, *shape: Any) -> Launch:
    *_, head_dim, _, _ = shape
    warps = min(4, max(1, splits_pow2 * head_dim // 1024))
    return bind(_combine_kernel, SPLITS_POW2=splits_pow2, **_shape(*shape), num_warps=warps)


def check_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor, gate: torch.Tensor | None
) -> None:
    """Raise ValueError for layouts that the attention kernels do not take."""
    heads, head_dim = q.shape[1:]
    check_caches(heads, head_dim, k_cache, v_cache, block_tables)
    if not q.is_contiguous():
        raise ValueError("queries must be contiguous")
    if gate is not None and (gate.shape != (q.shape[0], heads * head_dim) or gate.stride(1) != 1):
        raise ValueError(f"a gate {tuple(gate.shape)} for outputs {(q.shape[0], heads * head_dim)}")


def check_caches(heads: int, head_dim: int, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor) -> None:
    """Raise ValueError for caches `[N, P, kv_heads, head_dim]` and tables that the attention kernels do not take."""
    _, block_size, kv_heads, cached = k_cache.shape
    if head_dim != next_power_of_2(head_dim) or head_dim < 16 or cached != head_dim or heads % kv_heads:
        raise ValueError(f"{heads} heads of {head_dim} over {kv_heads} of {cached}; sizes are powers of two from 16")
    if block_size % 16 or k_cache.shape != v_cache.shape:
        raise ValueError(f"blocks of {block_size} positions, caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)}")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()) or block_tables.stride(1) != 1:
        raise ValueError("caches must be contiguous, and rows of block tables")


@triton.jit
def _span(index, seq_lens, query_start, spans, MAX_ROWS: tl.constexpr, WINDOW: tl.constexpr):
    """A span's number, its length, its first row, its rows, and the first position that any of them sees."""
    span = index
    if spans is not None:
        span = tl.load(spans + index).to(tl.int32)
    length = tl.load(seq_lens + span)
    row = span
    count = 1
    if query_start is not None:
        row = tl.load(query_start + span)
        count = tl.minimum(tl.load(query_start + span + 1) - row, MAX_ROWS)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(0, length - count - WINDOW + 1)
    return span, length, row, count, low


@triton.jit
def _share(length, low, splits, TILE: tl.constexpr):
    """Positions of one part, a multiple of TILE, and how many parts are not empty."""
    share = tl.maximum(tl.cdiv(tl.cdiv(length - low, TILE), splits) * TILE, TILE)
    return share, tl.cdiv(length - low, share)


@triton.jit
def _store_out(out, gate, value, row, element, here, gate_stride, WIDTH: tl.constexpr):
    """Elements of output rows, through the gate when there is one."""
    if gate is not None:
        value *= tl.sigmoid(tl.load(gate + row * gate_stride + element, mask=here, other=0.0).to(tl.float32))
    tl.store(out + row * WIDTH + element, value.to(out.dtype.element_ty), mask=here)


@triton.jit
def _pass_over(
    queries, position, begin, end, k_cache, v_cache, table, kv, scale,
    STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention over positions `begin .. end - 1`: of each row the highest score, the sum of weights, and of weighted values."""
    at = tl.arange(0, HEAD_DIM)
    # A masked score is finite: a row that sees nothing here leaves sums that weigh nothing beside those of a row that does.
    top = tl.full([PACKED], -1e30, tl.float32)
    total = tl.zeros([PACKED], tl.float32)
    summed = tl.zeros([PACKED, HEAD_DIM], tl.float32)
    # Blocks are looked up one tile ahead: a look-up inside of the loads would take half of the compiler's stages.
    key = begin + tl.arange(0, TILE)
    block = tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)
    for start in range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        live = key < end
        where = (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * STRIDE + kv * HEAD_DIM
        block = tl.load(table + (key + TILE) // BLOCK_SIZE, mask=key + TILE < end, other=0)
        keys = tl.load(k_cache + where[:, None] + at[None, :], mask=live[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        seen = live[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weight, 1)
        values = tl.load(v_cache + where[:, None] + at[None, :], mask=live[:, None], other=0.0)
        summed = tl.dot(weight.to(values.dtype), values, summed * fade[:, None], input_precision=PRECISION)
        top = higher
    return top, total, summed


# How wide block tables are changes from step to step where no graph has them.
@triton.jit(do_not_specialize=["splits", "table_stride"])
def _decode_kernel(
    q, k_cache, v_cache, block_tables, seq_lens, query_start, spans, gate, out, partial, stats, turns,
    table_stride, gate_stride, splits, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, MAX_ROWS: tl.constexpr,
    PACKED: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, IN_TURN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    split, kv, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    span, length, row, count, low = _span(index, seq_lens, query_start, spans, MAX_ROWS, WINDOW)
    share, used = _share(length, low, splits, TILE)
    packed = tl.arange(0, PACKED)
    at = tl.arange(0, HEAD_DIM)
    mine = packed // GROUP
    real = mine < count
    out_row = (row + mine).to(tl.int64)[:, None]
    element = (kv * GROUP + packed % GROUP)[:, None] * HEAD_DIM + at[None, :]
    if length <= 0:
        if split == 0:
            _store_out(out, None, tl.zeros([PACKED, HEAD_DIM], tl.float32), out_row, element, real[:, None], 0, HEADS * HEAD_DIM)
        return
    begin = low + split * share
    end = tl.minimum(begin + share, length)
    if begin >= length:
        return
    queries = tl.load(q + out_row * (HEADS * HEAD_DIM) + element, mask=real[:, None], other=0.0)
    position = length - count + mine
    table = block_tables + span.to(tl.int64) * table_stride
    top, total, summed = _pass_over(
        queries, position, begin, end, k_cache, v_cache, table, kv, scale,
        KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, PACKED, TILE, WINDOW, PRECISION,
    )  # fmt: skip
    if not SPLIT:  # noqa: SIM114
        _store_out(out, gate, summed / total[:, None], out_row, element, real[:, None], gate_stride, HEADS * HEAD_DIM)
    elif (used == 1) & IN_TURN:  # the branch before is chosen when compiling
        _store_out(out, gate, summed / total[:, None], out_row, element, real[:, None], gate_stride, HEADS * HEAD_DIM)
    else:
        head = index * KV_HEADS + kv
        partial += head.to(tl.int64) * splits * (PACKED * HEAD_DIM)
        stats += head.to(tl.int64) * splits * (2 * PACKED)
        cell = packed[:, None] * HEAD_DIM + at[None, :]
        tl.store(partial + split * (PACKED * HEAD_DIM) + cell, summed, mask=real[:, None])
        tl.store(stats + split * PACKED + packed, top, mask=real)
        tl.store(stats + (splits + split) * PACKED + packed, total, mask=real)
        if IN_TURN:
            tl.debug_barrier()
            if tl.atomic_add(turns + head, 1, sem="acq_rel") == used - 1:
                tl.store(turns + head, 0)
                summed, total = _combined(partial, stats, cell, packed, real, used, splits, PACKED, HEAD_DIM)
                _store_out(out, gate, summed / total[:, None], out_row, element, real[:, None], gate_stride, HEADS * HEAD_DIM)


@triton.jit
def _combined(partial, stats, cell, packed, real, used, splits, PACKED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The parts of one head together, in their order; rows that are not real weigh 1."""
    top = tl.full([PACKED], -1e30, tl.float32)
    total = tl.zeros([PACKED], tl.float32)
    summed = tl.zeros([PACKED, HEAD_DIM], tl.float32)
    for part in tl.range(0, used, loop_unroll_factor=4):
        theirs = tl.load(stats + part * PACKED + packed, mask=real, other=-1e30, cache_modifier=".cg")
        weight = tl.load(stats + (splits + part) * PACKED + packed, mask=real, other=0.0, cache_modifier=".cg")
        theirs_at = partial + part * (PACKED * HEAD_DIM) + cell
        value = tl.load(theirs_at, mask=real[:, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, theirs)
        fade, gain = tl.exp2(top - higher), tl.exp2(theirs - higher)
        total = total * fade + weight * gain
        summed = summed * fade[:, None] + value * gain[:, None]
        top = higher
    return summed, tl.where(real, total, 1.0)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    seq_lens,
    query_start,
    spans,
    gate,
    out,
    partial,
    stats,
    gate_stride,
    splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS_POW2: tl.constexpr,
    WINDOW: tl.constexpr,
):
    packed, kv, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    _, length, row, count, low = _span(index, seq_lens, query_start, spans, MAX_ROWS, WINDOW)
    _, used = _share(length, low, splits, TILE)
    if (packed // GROUP >= count) | (length <= 0):
        return
    head = (index * KV_HEADS + kv).to(tl.int64)
    part = tl.arange(0, SPLITS_POW2)
    at = tl.arange(0, HEAD_DIM)
    live = part < used
    stats += head * (2 * splits * PACKED) + packed
    top = tl.load(stats + part * PACKED, mask=live, other=-1e30)
    total = tl.load(stats + (splits + part) * PACKED, mask=live, other=0.0)
    value = tl.load(
        partial + ((head * splits + part[:, None]) * PACKED + packed) * HEAD_DIM + at[None, :], mask=live[:, None], other=0.0
    )
    gain = tl.exp2(top - tl.max(top, 0))
    result = tl.sum(value * gain[:, None], 0) / tl.sum(total * gain, 0)
    element = (kv * GROUP + packed % GROUP) * HEAD_DIM + at
    _store_out(out, gate, result, (row + packed // GROUP).to(tl.int64), element, at < HEAD_DIM, gate_stride, HEADS * HEAD_DIM)
