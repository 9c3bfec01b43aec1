"""Paged attention on the GPU for pieces of prompts: the rows of all spans of a batch in one launch.
 The same function as `kernels.paged_attention.piece_attention`, which is the specification. A program takes a tile of rows of one
span for all query heads of a key/value head, and passes over the keys that its rows see with a running softmax (FlashAttention-2,
arXiv 2307.08691). Only tiles of keys at the edge of what is seen are masked.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.launch import Launch, bind, next_power_of_2
from kernels.paged_decode_triton import check_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """`packed` (row, head) pairs by `tile` positions a step of a program, and how the compiler schedules it.

    `registers` is the most of a thread, where given: fewer let more programs share a multiprocessor.
    """

    packed: int = 128
    tile: int = 64
    warps: int = 8
    stages: int = 2
    registers: int | None = None

    def tile_rows(self, group: int) -> int:
        """Rows of a program, for `group` query heads a key/value head."""
        return max(1, self.packed // next_power_of_2(group))


@cache
def default_prefill_config(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> PrefillConfig:
    """Two programs a multiprocessor, so that one takes its softmax while the other multiplies; one where heads are wide.

    Small tiles for float32.
    """
    if dtype == torch.float32:
        return PrefillConfig(packed=32, tile=32, warps=4, stages=1)
    return PrefillConfig(registers=128 if head_dim <= 128 else None)


def prefill_tiles(query_start: np.ndarray, seq_lens: np.ndarray, spans: Sequence[int], tile_rows: int) -> np.ndarray:
    """`[tiles, 2]` int32, (span, first row within it), on the host: the longest work first, so that the last programs are short."""
    tiles, work = [], []
    for span in spans:
        rows = int(query_start[span + 1] - query_start[span])
        start = int(seq_lens[span]) - rows
        firsts = np.arange(0, rows, tile_rows, dtype=np.int32)
        tiles.append(np.stack((np.full_like(firsts, span), firsts), 1))
        work.append(start + np.minimum(firsts + tile_rows, rows))
    if not tiles:
        return np.empty((0, 2), dtype=np.int32)
    order = np.argsort(-np.concatenate(work), kind="stable")
    return np.ascontiguousarray(np.concatenate(tiles)[order])


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: torch.Tensor,
    *,
    window: int | None = None,
    gate: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """Attention of the rows that `tiles` name, q `[T, heads, head_dim]` -> `[T, heads * head_dim]`.
     `tiles` is what `prefill_tiles` gave for the config's `tile_rows`, on the device. Other arguments as of `paged_decode`. Rows of
    spans that have no tile are left as they are in `out`.
    """
    rows, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    check_attention(q, k_cache, v_cache, block_tables, gate)
    if tiles.dtype != torch.int32 or not tiles.is_contiguous():
        raise ValueError(f"tiles {tuple(tiles.shape)} of {tiles.dtype}; they are contiguous int32")
    if out is None:
        out = torch.empty(rows, heads * head_dim, dtype=q.dtype, device=q.device)
    if tiles.shape[0] == 0:
        return out
    config = config or default_prefill_config(head_dim, q.dtype)
    _prefill(config, heads, kv_heads, head_dim, block_size, window, q.dtype)(
        (tiles.shape[0] * kv_heads, 1, 1),
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start,
        seq_lens,
        tiles,
        gate,
        out,
        block_tables.stride(0),
        0 if gate is None else gate.stride(0),
        math.log2(math.e) / math.sqrt(head_dim),
    )
    return out


@cache
def _prefill(
    config: PrefillConfig, heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None, dtype: torch.dtype
) -> Launch:
    group = heads // kv_heads
    limit = {} if config.registers is None else {"maxnreg": config.registers}
    return bind(
        _prefill_kernel,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ROWS=config.tile_rows(group),
        GROUP_POW2=next_power_of_2(group),
        TILE=config.tile,
        WINDOW=window or 0,
        PRECISION="tf32x3" if dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
        **limit,
    )


@triton.jit
def _attend(
    summed, top, total, queries, position, begin, end, length, k_cache, v_cache, table, scale,
    STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pass over positions `begin .. end - 1`, TILE at a time; unmasked ones are seen by every row, in whole tiles."""
    # Tiles begin at multiples of TILE: where blocks divide it, places within them are the same in every tile.
    fixed = (tl.arange(0, TILE) % BLOCK_SIZE * STRIDE)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    if TILE % BLOCK_SIZE == 0:
        k_cache += fixed
        v_cache += fixed
    for start in range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        live = key < length
        if MASKED:
            block = tl.load(table + key // BLOCK_SIZE, mask=live, other=0)
        else:
            block = tl.load(table + key // BLOCK_SIZE)
        place = (block.to(tl.int64) * (BLOCK_SIZE * STRIDE))[:, None]
        if TILE % BLOCK_SIZE != 0:
            place = place + (key % BLOCK_SIZE * STRIDE)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
        if MASKED:
            keys = tl.load(k_cache + place, mask=live[:, None], other=0.0)
            values = tl.load(v_cache + place, mask=live[:, None], other=0.0)
        else:
            keys = tl.load(k_cache + place)
            values = tl.load(v_cache + place)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        if MASKED:
            seen = live[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                seen &= key[None, :] > position[:, None] - WINDOW
            scores = tl.where(seen, scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        if MASKED:
            # A fused multiply and subtract of masked scores would leave their rounding error, which is huge.
            weight = tl.exp2((scores - higher[:, None]) * scale)
        else:
            weight = tl.exp2(scores * scale - (higher * scale)[:, None])
        fade = tl.exp2((top - higher) * scale)
        total = total * fade + tl.sum(weight, 1)
        summed = summed * fade[:, None]
        summed = tl.dot(weight.to(values.dtype), values, summed, input_precision=PRECISION)
        top = higher
    return summed, top, total


# How wide block tables are changes from step to step.
@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q, k_cache, v_cache, block_tables, query_start, seq_lens, tiles, gate, out, table_stride, gate_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    GROUP_POW2: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    index, kv = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    span = tl.load(tiles + 2 * index)
    first = tl.load(tiles + 2 * index + 1)
    row = tl.load(query_start + span)
    count = tl.load(query_start + span + 1) - row
    length = tl.load(seq_lens + span)
    packed = tl.arange(0, ROWS * GROUP_POW2)
    mine, member = first + packed // GROUP_POW2, packed % GROUP_POW2
    real = (mine < count) & (member < GROUP)
    at = tl.arange(0, HEAD_DIM)
    out_row = (row + mine).to(tl.int64)[:, None]
    element = (kv * GROUP + member)[:, None] * HEAD_DIM + at[None, :]
    queries = tl.load(q + out_row * (HEADS * HEAD_DIM) + element, mask=real[:, None], other=0.0)
    # Rows past the span's end see what its last row sees, and are not stored.
    position = length - count + tl.minimum(mine, count - 1)
    low, high = length - count + first, tl.minimum(length - count + first + ROWS, length)
    k_cache += kv * HEAD_DIM
    v_cache += kv * HEAD_DIM
    table = block_tables + span.to(tl.int64) * table_stride
    top = tl.full([ROWS * GROUP_POW2], -1e30, tl.float32)
    total = tl.zeros([ROWS * GROUP_POW2], tl.float32)
    summed = tl.zeros([ROWS * GROUP_POW2, HEAD_DIM], tl.float32)
    # Every row sees positions `everywhere .. whole - 1`; the tiles before and after hold edges.
    begin = 0
    everywhere = 0
    whole = (low + 1) // TILE * TILE
    if WINDOW > 0:
        begin = tl.maximum(low - WINDOW + 1, 0) // TILE * TILE
        everywhere = tl.cdiv(tl.maximum(high - WINDOW, 0), TILE) * TILE
        whole = tl.maximum(whole, everywhere)
        if everywhere > begin:
            summed, top, total = _attend(
                summed, top, total, queries, position, begin, tl.minimum(everywhere, high), length,
                k_cache, v_cache, table, scale, STRIDE, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, True, PRECISION,
            )  # fmt: skip
    summed, top, total = _attend(
        summed, top, total, queries, position, whole, high, length,
        k_cache, v_cache, table, scale, STRIDE, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, True, PRECISION,
    )  # fmt: skip
    summed, top, total = _attend(
        summed, top, total, queries, position, everywhere, whole, length,
        k_cache, v_cache, table, scale, STRIDE, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, False, PRECISION,
    )  # fmt: skip
    result = summed / total[:, None]
    if gate is not None:
        opened = tl.load(gate + out_row * gate_stride + element, mask=real[:, None], other=0.0)
        result *= tl.sigmoid(opened.to(tl.float32))
    tl.store(out + out_row * (HEADS * HEAD_DIM) + element, result.to(out.dtype.element_ty), mask=real[:, None])
