"""Attention of a decode step on the GPU in one kernel: from the fused projection to the input of the output projection.

Norms of heads, rotary embedding, the write into the paged cache and attention over it, for one new row of each of many sequences:
the same functions as `kernels.rms_norm`, `kernels.rotary`, `kernels.paged_attention.write_kv` and `decode_attention`, which are the
specification. A program takes one part of one sequence for all query heads of a key/value head. The first part's program makes the
new key and value, uses them from its registers and stores them; the cache is read below them only, and these reads start while
the kernel before this one still runs. Whichever program of a head ends last adds the parts up in their order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.launch import next_power_of_2
from kernels.paged_decode_triton import check_caches


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """`tile` positions a turn of a program; at most `splits` parts of a sequence, one if it has at most `alone` positions."""

    tile: int
    warps: int
    stages: int
    splits: int = 1
    alone: int = 256


def default_step_config(rows: int, kv_heads: int, head_dim: int, max_seq: int, dtype: torch.dtype = torch.bfloat16) -> StepConfig:
    """What was best on an H200 at lengths from 150 to 32000.

    Few programs take much at once, and long sequences in as many parts as fill the chip; more programs have to fit in side by side,
    and split only what would keep the others waiting.
    """
    pairs, width = rows * kv_heads, head_dim * dtype.itemsize
    if width <= 256:
        tile, warps, stages = (256, 8, 2) if pairs <= 132 else (64, 4, 3) if pairs < 384 else (32, 2, 3)
    elif width <= 512:
        tile, warps, stages = (64, 8, 3) if pairs < 256 else (32, 4, 3)
    else:
        tile, warps, stages = (32, 8, 2)
    alone = 256 if pairs <= 132 else 1536
    wanted = next_power_of_2(max(4, 128 // pairs))
    return StepConfig(tile=tile, warps=warps, stages=stages, splits=1 if max_seq <= alone else min(wanted, 64), alone=alone)


def attention_step(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    places: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    turns: torch.Tensor,
    *,
    heads: int,
    max_seq: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    zero_centered: bool = False,
    gated: bool = False,
    window: int | None = None,
    config: StepConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`[S, heads * head_dim]` of rows `projected [S, (heads + 2 kv_heads) head_dim]`: queries, keys, values, and a gate if `gated`.

    Row s is the last of a sequence of `seq_lens[s]` positions (int32, at most `max_seq`) in blocks `block_tables [S, B]` int32 of
    caches `[N, P, kv_heads, head_dim]`, P a multiple of 16. Its key and value go to `places[s]`, the place of that position; where
    that is negative they are in the cache already. Length 0 is an idle row: it becomes zeros. cos, sin `[S, rotary_dim / 2]`
    float32. `turns` int32 holds a zero for each (row, key/value head), before and after. With `pdl` the kernel before this one in
    the stream must write nothing that this one reads but `projected`.
    """
    rows, kv_heads, head_dim = projected.shape[0], k_cache.shape[2], k_cache.shape[3]
    half = cos.shape[1]
    width = heads * head_dim
    check_caches(heads, head_dim, k_cache, v_cache, block_tables)
    _check_step(projected, cos, sin, turns, q_norm, k_norm, heads, kv_heads, head_dim, gated)
    out = torch.empty(rows, width, dtype=projected.dtype, device=projected.device)
    if rows == 0:
        return out
    config = config or default_step_config(rows, kv_heads, head_dim, max_seq, projected.dtype)
    group, splits = heads // kv_heads, config.splits
    members = next_power_of_2(group)
    partial = weights = None
    if splits > 1:
        partial = torch.empty(rows, kv_heads, splits, members, head_dim, dtype=torch.float32, device=projected.device)
        weights = torch.empty(rows, kv_heads, splits, members, 4, dtype=torch.float32, device=projected.device)
    _step_kernel[(splits, kv_heads, rows)](
        *(projected, cos, sin, q_norm, k_norm, places, block_tables, seq_lens, k_cache, v_cache, out, partial, weights),
        turns if splits > 1 else None,
        projected.stride(0),
        block_tables.stride(0),
        block_tables.shape[1],
        splits,
        eps,
        math.log2(math.e) / math.sqrt(head_dim),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_SIZE=k_cache.shape[1],
        MEMBERS=members,
        WINDOW=window or 0,
        NORM=q_norm is not None,
        PLUS=1.0 if zero_centered else 0.0,
        GATED=gated,
        PDL=pdl,
        launch_pdl=pdl,
        **_options(config, members, head_dim, projected.dtype),
    )
    return out


def _check_step(projected, cos, sin, turns, q_norm, k_norm, heads: int, kv_heads: int, head_dim: int, gated: bool) -> None:
    """Raise ValueError for rows, tables and norms that the kernel does not take."""
    rows, half = projected.shape[0], cos.shape[1]
    if (q_norm is None) != (k_norm is None):
        raise ValueError("queries and keys are normalised both or not at all")
    wanted = ((2 if gated else 1) * heads + 2 * kv_heads) * head_dim
    if projected.stride(1) != 1 or projected.shape[1] < wanted or 2 * half > head_dim:
        raise ValueError(
            f"rows {tuple(projected.shape)} for {heads} + 2 * {kv_heads} heads of {head_dim}, {2 * half} of them turned"
        )
    if not (cos.is_contiguous() and sin.is_contiguous()) or turns.numel() < rows * kv_heads:
        raise ValueError(f"tables must be contiguous, and {turns.numel()} turns are for {rows} rows of {kv_heads} heads")


def _options(config: StepConfig, members: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """What a configuration makes of the kernel, for so many query heads a key/value head."""
    return {
        "PACKED": max(8, members),
        "CHUNK": min(16, max(1, 64 * 32 * config.warps // (members * head_dim))),
        "TILE": config.tile,
        "ALONE": max(1, config.alone // config.tile),
        "SPLIT": config.splits > 1,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
        "STAGES": config.stages,
        "num_warps": config.warps,
    }


@triton.jit
def _wait_for_projection():
    """Wait for the kernel before this one, then let the one after it start. In assembly, since in newer releases of Triton its
    functions for this keep the compiler from copying ahead in the loop that calls them."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _turned(x, partner, by, partner_by, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """Heads `[N, HEAD_DIM]` normalised and turned: `partner` holds for each element the one that it turns with."""
    turned = x * by + partner * partner_by
    if NORM:
        turned *= tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
    return turned


@triton.jit
def _norm_weight(weight, at, PLUS: tl.constexpr):
    """Float32 factors of normalised elements."""
    value = tl.load(weight + at).to(tl.float32)
    if PLUS != 0.0:
        value += PLUS
    return value


@triton.jit
def _look_up(table, tile, lane, table_width, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The blocks of a tile's positions. Entries past a sequence's blocks are read, too, but name blocks that exist."""
    if TILE % BLOCK_SIZE == 0:
        begin = tile * (TILE // BLOCK_SIZE)
        found = tl.load(table + begin + lane // BLOCK_SIZE, mask=lane // BLOCK_SIZE < table_width - begin, other=0)
    else:
        number = (tile * TILE + lane) // BLOCK_SIZE
        found = tl.load(table + number, mask=number < table_width, other=0)
    return found


@triton.jit
def _prefetch(entry):
    """Bring a table's entry to L1, with those beside it: the next look-ups, which are only a few clocks away then."""
    tl.inline_asm_elementwise("prefetch.global.L1 [$1];\nmov.b32 $0, 0;", "=r,l", [entry], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _position(block, tile, lane, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The places in a cache of a tile's positions, whose blocks are known."""
    if TILE % BLOCK_SIZE == 0:
        return block * BLOCK_SIZE + lane % BLOCK_SIZE
    else:
        return block * BLOCK_SIZE + (tile * TILE + lane) % BLOCK_SIZE


@triton.jit
def _factors(cos, sin, q_norm, k_norm, row, own, other, HALF: tl.constexpr, NORM: tl.constexpr, PLUS: tl.constexpr):
    """Of elements of queries and of those that they turn with, then of keys': rotation and norm's weight together."""
    angle = row * HALF + own % HALF
    turns_here = own < 2 * HALF
    c = tl.load(cos + angle, mask=turns_here, other=1.0)
    s = tl.load(sin + angle, mask=turns_here, other=0.0)
    s = tl.where(own < HALF, -s, s)
    q_by, q_other_by = c, s
    k_by, k_other_by = c, s
    if NORM:
        q_by, q_other_by = c * _norm_weight(q_norm, own, PLUS), s * _norm_weight(q_norm, other, PLUS)
        k_by, k_other_by = c * _norm_weight(k_norm, own, PLUS), s * _norm_weight(k_norm, other, PLUS)
    return q_by, q_other_by, k_by, k_other_by


@triton.jit
def _new_row(
    source, k_cache, v_cache, place, made_rows, makes, own, other, by, kv, eps, scale, gate,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PACKED: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Queries, score, value and gate of the projection's row; its key and value, in rows that `makes` names, go to `place`."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    member = tl.arange(0, PACKED)[:, None]
    real = member < GROUP
    q_by, q_other_by, k_by, k_other_by = by
    q_at = source + kv * ((GROUP - 1) * HEAD_DIM) + member * HEAD_DIM
    k_at = source + HEADS * HEAD_DIM
    x = tl.load(q_at + own, mask=real, other=0.0).to(tl.float32)
    x_other = tl.load(q_at + other, mask=real, other=0.0).to(tl.float32)
    y = tl.load(k_at + own, mask=makes, other=0.0).to(tl.float32)
    y_other = tl.load(k_at + other, mask=makes, other=0.0).to(tl.float32)
    value = tl.load(k_at + KV_HEADS * HEAD_DIM + own, mask=makes, other=0.0)
    if GATED:
        gate = tl.load(q_at + (HEADS + 2 * KV_HEADS) * HEAD_DIM + own, mask=real, other=0.0)
    queries = _turned(x, x_other, q_by, q_other_by, eps, HEAD_DIM, NORM).to(value.dtype)
    made = _turned(y, y_other, k_by, k_other_by, eps, HEAD_DIM, NORM).to(value.dtype)
    to = place * (KV_HEADS * HEAD_DIM) + kv * HEAD_DIM + own
    tl.store(k_cache + to, made, mask=member < tl.minimum(made_rows, 1))
    tl.store(v_cache + to, value, mask=member < tl.minimum(made_rows, 1))
    return queries, tl.sum(queries.to(tl.float32) * made.to(tl.float32), 1) * scale, value, gate


@triton.jit
def _attend(queries, keys, values, live, top, totals, summed, scale, PRECISION: tl.constexpr):
    """A tile of positions into the running softmax: the highest scores, weights by column, weighted values."""
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
    scores = tl.where(live[None, :], scores, -1e30)
    higher = tl.maximum(top, tl.max(scores, 1))
    weight = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(top - higher)
    totals = totals * fade[:, None] + weight
    summed = tl.dot(weight.to(values.dtype), values, summed * fade[:, None], input_precision=PRECISION)
    return higher, totals, summed


@triton.jit
def _pass_over(
    k_cache, v_cache, table, table_width, block, first, stop, used, low, end, source, place, made_rows, own, other, by, kv, eps,
    scale, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PACKED: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every `used`-th tile from `first` to before `stop`: highest scores, sums of weights and of weighted values; and the gate."""
    at, packed, lane = tl.arange(0, HEAD_DIM), tl.arange(0, PACKED), tl.arange(0, TILE)
    makes = packed[:, None] < made_rows
    # A masked score is finite: a row that sees nothing here leaves sums that weigh nothing beside those of a row that does.
    # Weights are summed up by column: their sum over a row is taken once, at the end.
    top = tl.full([PACKED], -1e30, tl.float32)
    totals = tl.zeros([PACKED, TILE], tl.float32)
    summed = tl.zeros([PACKED, HEAD_DIM], tl.float32)
    queries = tl.zeros([PACKED, HEAD_DIM], k_cache.dtype.element_ty)
    gate = tl.zeros([PACKED, HEAD_DIM], k_cache.dtype.element_ty)
    keys_at = k_cache + kv * HEAD_DIM + at[None, :]
    values_at = v_cache + kv * HEAD_DIM + at[None, :]
    for tile in tl.range(first, stop, used, num_stages=STAGES):
        live = lane < end - tile * TILE
        if WINDOW > 0:
            live &= lane >= low - tile * TILE
        where = (_position(block, tile, lane, TILE, BLOCK_SIZE).to(tl.int64) * (KV_HEADS * HEAD_DIM))[:, None]
        keys = tl.load(keys_at + where, mask=live[:, None], other=0.0)
        values = tl.load(values_at + where, mask=live[:, None], other=0.0)
        # Blocks are looked up one tile ahead: a look-up just before the loads would take half of the compiler's stages.
        block = _look_up(table, tile + used, lane, table_width, TILE, BLOCK_SIZE)
        if tile == first:
            # What the cache holds was written by earlier steps: its first tiles are on their way while the projection ends.
            if PDL:
                _wait_for_projection()
            queries, score, value, gate = _new_row(
                source, k_cache, v_cache, place, made_rows, makes, own, other, by, kv, eps, scale, gate,
                HEADS, KV_HEADS, HEAD_DIM, PACKED, NORM, GATED,
            )  # fmt: skip
            top = tl.where(packed < made_rows, score, -1e30)
            totals = tl.where(makes & (lane[None, :] == 0), 1.0, totals)
            summed = value.to(tl.float32)
        top, totals, summed = _attend(queries, keys, values, live, top, totals, summed, scale, PRECISION)
    return top, tl.sum(totals, 1), summed, gate


# How wide block tables are changes from step to step where no graph has them.
@triton.jit(do_not_specialize=["splits", "table_stride", "table_width"])
def _step_kernel(
    projected, cos, sin, q_norm, k_norm, places, block_tables, seq_lens, k_cache, v_cache, out, partial, weights, turns,
    row_stride, table_stride, table_width, splits, eps, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PACKED: tl.constexpr, MEMBERS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr, WINDOW: tl.constexpr,
    NORM: tl.constexpr, PLUS: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    split, kv, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    at = tl.arange(0, HEAD_DIM)
    member = tl.arange(0, PACKED)[:, None]
    lane = tl.arange(0, TILE)
    real = member < GROUP
    out += row * (HEADS * HEAD_DIM) + kv * (GROUP * HEAD_DIM)
    cell = member * HEAD_DIM + at[None, :]
    table = block_tables + row * table_stride
    length = tl.load(seq_lens + row)
    place = tl.load(places + row)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(0, length - WINDOW)
    # Positions `low .. end - 1` come from the cache; tiles start at multiples of TILE, so that the first one's addresses are known
    # before the length is.
    start = low // TILE
    first = start + split
    block = _look_up(table, first, lane, table_width, TILE, BLOCK_SIZE)
    if PDL:
        _prefetch(table + tl.minimum((first + 2) * TILE // BLOCK_SIZE, table_width - 1))
    end = length - (place >= 0).to(tl.int32)
    stop = tl.maximum(tl.cdiv(end, TILE), start + 1)
    used = 1
    if SPLIT:
        # As many parts as tiles, or the fewest that have no more tiles than the longest of `splits`.
        tiles = stop - start
        used = tl.where(tiles <= ALONE, 1, tl.cdiv(tiles, tl.cdiv(tiles, splits)))
        if split >= used:
            return
    if length <= 0:
        if PDL:
            _wait_for_projection()
        tl.store(out + cell, tl.zeros([PACKED, HEAD_DIM], out.dtype.element_ty), mask=real)
        return

    # The element that each one turns with, or itself where nothing turns. What all heads have in common is loaded as if each had
    # its own, so that no value changes its place among the threads.
    partner = tl.where(at < HALF, at + HALF, tl.where(at < 2 * HALF, at - HALF, at))
    own, other = member * 0 + at[None, :], member * 0 + partner[None, :]
    by = _factors(cos, sin, q_norm, k_norm, row, own, other, HALF, NORM, PLUS)
    source = projected + row * row_stride + kv * HEAD_DIM
    made_rows = tl.where(split == 0, tl.where(place >= 0, PACKED, 0), 0)
    top, total, summed, gate = _pass_over(
        k_cache, v_cache, table, table_width, block, first, stop, used, low, end, source, place, made_rows, own, other, by, kv, eps,
        scale, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, PACKED, TILE, WINDOW, NORM, GATED, PRECISION, STAGES, PDL,
    )  # fmt: skip
    result = summed / total[:, None]
    alone = True
    if SPLIT:
        alone = used == 1
    if alone:
        if GATED:
            result *= tl.sigmoid(gate.to(tl.float32))
        tl.store(out + cell, result.to(out.dtype.element_ty), mask=real)
    elif SPLIT:
        _leave(
            partial, weights, turns, result, top, total, row * KV_HEADS + kv, split, splits, used, source, kv, out,
            HEADS, KV_HEADS, HEAD_DIM, PACKED, MEMBERS, CHUNK, GATED,
        )  # fmt: skip


@triton.jit
def _leave(
    partial, weights, turns, result, top, total, head, split, splits, used, source, kv, out,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PACKED: tl.constexpr, MEMBERS: tl.constexpr,
    CHUNK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Store a part of one head, and its weights; whichever program does so last adds up all."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    member = tl.arange(0, PACKED)[:, None]
    real = member < GROUP
    cell = member * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    partial += head * splits * (MEMBERS * HEAD_DIM)
    weights += head * splits * (MEMBERS * 4)
    tl.store(partial + split * (MEMBERS * HEAD_DIM) + cell, result, mask=real)
    copies = tl.arange(0, 4)[None, :]
    weight = (top + tl.log2(total))[:, None] + copies * 0.0
    tl.store(weights + (split * MEMBERS + member) * 4 + copies, weight, mask=real)
    tl.debug_barrier()
    if tl.atomic_add(turns + head, 1, sem="acq_rel") == used - 1:
        tl.store(turns + head, 0)
        gates = source + kv * ((GROUP - 1) * HEAD_DIM) + (HEADS + 2 * KV_HEADS) * HEAD_DIM
        _add_up(partial, weights, gates, out, used, GROUP, MEMBERS, HEAD_DIM, CHUNK, GATED)


@triton.jit
def _add_up(
    partial,
    weights,
    gates,
    out,
    used,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    GATED: tl.constexpr,
):
    """The parts of one head in their order, CHUNK asked for at once. Weights are logarithms, four copies of each: every element's
    thread loads its own row's, so that no value changes its place among the threads."""
    member = tl.arange(0, MEMBERS)[:, None]
    at = tl.arange(0, HEAD_DIM)[None, :]
    real = member < GROUP
    cell = member * HEAD_DIM + at
    top = tl.full([MEMBERS, HEAD_DIM], -1e30, tl.float32)
    total = tl.zeros([MEMBERS, HEAD_DIM], tl.float32)
    summed = tl.zeros([MEMBERS, HEAD_DIM], tl.float32)
    for start in range(0, used, CHUNK):
        for step in tl.static_range(CHUNK):
            part = start + step
            here = member < tl.where(part < used, GROUP, 0)
            theirs_at = weights + (part * MEMBERS + member) * 4 + at % 4
            theirs = tl.load(theirs_at, mask=here, other=-1e30, cache_modifier=".cg")
            value = tl.load(partial + part * (MEMBERS * HEAD_DIM) + cell, mask=here, other=0.0, cache_modifier=".cg")
            less = tl.exp2(-tl.abs(theirs - top))
            fade, gain = tl.where(theirs > top, less, 1.0), tl.where(theirs > top, 1.0, less)
            total = total * fade + gain
            summed = summed * fade + value * gain
            top = tl.maximum(top, theirs)
    result = summed / total
    if GATED:
        result *= tl.sigmoid(tl.load(gates + cell, mask=real, other=0.0).to(tl.float32))
    tl.store(out + cell, result.to(out.dtype.element_ty), mask=real)
