"""Pieces of prompts through Gated DeltaNet on the GPU: chunks in parallel, states from chunk to chunk, outputs in parallel.
 The same function as `kernels.gated_delta.delta_chunks` and the gated norm after it, which are the specification (WY form, arXiv
2406.06484, with gates as in arXiv 2412.06464). Products take operands of the model's dtype and sum in float32; the triangular
inverse, the gates and the carried state are float32. Three launches for all spans of a batch; scratch is `channels`-sized rows
and one state of the model's dtype for each chunk and head.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from kernels.causal_conv_triton import conv_pieces
from kernels.delta_decode_triton import DeltaWeights, check_delta
from kernels.delta_plan import DeltaPlan
from kernels.gated_delta import CHUNK
from kernels.launch import Launch, bind


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaChunkConfig:
    """How the three kernels are scheduled; `tile` columns of a state stay in one program from chunk to chunk."""

    tile: int = 32
    state_warps: int = 4
    state_stages: int = 2
    chunk_warps: int = 4
    output_warps: int = 8


def delta_pieces(
    projected: torch.Tensor,
    conv_state: torch.Tensor,
    h: torch.Tensor,
    slots: torch.Tensor,
    weights: DeltaWeights,
    plan: DeltaPlan,
    *,
    key_heads: int,
    out: torch.Tensor | None = None,
    config: DeltaChunkConfig | None = None,
) -> torch.Tensor:
    """`[T, value_heads * value_dim]`, normed and gated, of the plan's spans. Arguments as of `delta_decode`.

    `slots[span]` is a span's slot. Both pools are updated in place. Rows of other spans are left as they are in `out`.
    """
    rows = projected.shape[0]
    value_heads, key_dim, value_dim = h.shape[1:]
    check_delta(projected, conv_state, h, weights, key_heads)
    if out is None:
        out = torch.empty(rows, value_heads * value_dim, dtype=projected.dtype, device=projected.device)
    count = plan.chunks.shape[0]
    if count == 0:
        return out
    config = config or DeltaChunkConfig(tile=min(32, value_dim))
    inputs = conv_pieces(
        projected, conv_state, slots, weights.conv, plan, key_heads=key_heads, value_heads=value_heads, value_dim=value_dim
    )
    seen_keys = torch.empty(rows, value_heads, key_dim, dtype=projected.dtype, device=projected.device)
    new_values = torch.empty(rows, value_heads, value_dim, dtype=projected.dtype, device=projected.device)
    decay = torch.empty(rows, value_heads, dtype=torch.float32, device=projected.device)
    states = torch.empty(count, value_heads, key_dim, value_dim, dtype=projected.dtype, device=projected.device)
    stride, grid = projected.stride(0), (value_heads, count, 1)
    chunk, state, output = _bound(config, key_heads, value_heads, key_dim, value_dim, projected.dtype)
    chunk(grid, inputs, projected, weights.a_log, weights.dt_bias, plan.chunks, seen_keys, new_values, decay, stride)
    state(
        (value_dim // config.tile, value_heads, plan.spans.shape[0]),
        inputs, plan.chunks, plan.spans, slots, seen_keys, new_values, decay, h, states,
    )  # fmt: skip
    output(grid, inputs, projected, plan.chunks, new_values, decay, states, weights.norm, out, stride, weights.eps)
    return out


@cache
def _bound(
    config: DeltaChunkConfig, key_heads: int, value_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[Launch, Launch, Launch]:
    """The three kernels, in their order."""
    shape = {
        "KEY_HEADS": key_heads,
        "VALUE_HEADS": value_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "ROWS": CHUNK,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
    }
    state = {"TILE": config.tile, "num_warps": config.state_warps, "num_stages": config.state_stages}
    return (
        bind(_chunk_kernel, **shape, num_warps=config.chunk_warps),
        bind(_state_kernel, **shape, **state),
        bind(_output_kernel, **shape, num_warps=config.output_warps),
    )


@triton.jit
def _chunk(chunks, number, ROWS: tl.constexpr):
    """A chunk's first row, and its rows."""
    first, before, span_rows = tl.load(chunks + 4 * number), tl.load(chunks + 4 * number + 1), tl.load(chunks + 4 * number + 2)
    return first.to(tl.int64), tl.minimum(span_rows - before, ROWS)


@triton.jit
def _unit_inverse(lower, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse of I + lower, strictly lower triangular `[ROWS, ROWS]` float32.

    Blocks of 16 on the diagonal by substitution, all at once; then pairs of blocks: `[[A, 0], [C, B]]` has the inverse
    `[[A', 0], [-B' C A', B']]`, which for all pairs at once is `X - X C X` with X the block diagonal of the inverses.
    """
    BLOCKS: tl.constexpr = ROWS // 16
    row, column = tl.arange(0, ROWS)[:, None] // 16, tl.arange(0, ROWS)[None, :] // 16
    over, across = tl.arange(0, BLOCKS)[:, None, None, None], tl.arange(0, BLOCKS)[None, None, :, None]
    blocks = tl.sum(tl.where(over == across, tl.reshape(lower, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    inverse = tl.where(i == j, 1.0, tl.zeros([BLOCKS, 16, 16], tl.float32))
    for step in range(15):
        factor = tl.sum(tl.where(j == step, blocks, 0.0), 2)
        done = tl.sum(tl.where(i == step, inverse, 0.0), 1)
        inverse -= factor[:, :, None] * done[:, None, :]
    x = tl.reshape(tl.where(over == across, inverse[:, :, None, :], 0.0), [ROWS, ROWS])
    for size in tl.static_range(1, BLOCKS):
        # Pairs of 1, 2, 4 .. blocks: the powers of two below the number of blocks.
        if (size & (size - 1)) == 0:
            pair = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
            below = tl.dot(x, tl.where(pair, lower, 0.0), input_precision=PRECISION)
            x -= tl.dot(below, x, input_precision=PRECISION)
    return x


@triton.jit
def _chunk_kernel(
    inputs,
    projected,
    a_log,
    dt_bias,
    chunks,
    seen_keys,
    new_values,
    decay,
    row_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    head = tl.program_id(0)
    first, rows = _chunk(chunks, tl.program_id(1), ROWS)
    at = tl.arange(0, ROWS)
    live = at < rows
    row = first + at
    element, column = tl.arange(0, KEY_DIM)[None, :], tl.arange(0, VALUE_DIM)[None, :]
    k_at = inputs + row[:, None] * CHANNELS + (KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM + element
    v_at = inputs + row[:, None] * CHANNELS + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
    keys = tl.load(k_at, mask=live[:, None], other=0.0)
    gates = projected + row * row_stride + CHANNELS + VALUE_HEADS * VALUE_DIM + head
    beta = tl.where(live, tl.sigmoid(tl.load(gates, mask=live, other=0.0).to(tl.float32)), 0.0)
    step = tl.load(gates + VALUE_HEADS, mask=live, other=0.0).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    softplus = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    g = tl.where(live, -tl.exp(tl.load(a_log + head).to(tl.float32)) * softplus, 0.0)
    sums = tl.cumsum(g, 0)
    tl.store(decay + row * VALUE_HEADS + head, sums, mask=live)
    between = tl.where(at[:, None] > at[None, :], sums[:, None] - sums[None, :], float("-inf"))
    lower = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * beta[:, None] * tl.exp(between)
    inverse = _unit_inverse(lower, ROWS, PRECISION).to(keys.dtype)
    values = tl.load(v_at, mask=live[:, None], other=0.0)
    right = (values.to(tl.float32) * beta[:, None]).to(keys.dtype)
    solved = tl.dot(inverse, right, input_precision=PRECISION)
    to = (row[:, None] * VALUE_HEADS + head) * VALUE_DIM + column
    tl.store(new_values + to, solved.to(keys.dtype), mask=live[:, None])
    right = (keys.to(tl.float32) * (beta * tl.exp(sums))[:, None]).to(keys.dtype)
    solved = tl.dot(inverse, right, input_precision=PRECISION)
    to = (row[:, None] * VALUE_HEADS + head) * KEY_DIM + element
    tl.store(seen_keys + to, solved.to(keys.dtype), mask=live[:, None])


@triton.jit
def _state_kernel(
    inputs,
    chunks,
    spans,
    slots,
    seen_keys,
    new_values,
    decay,
    h,
    states,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    head, number = tl.program_id(1), tl.program_id(2)
    first_chunk, count = tl.load(spans + 2 * number), tl.load(spans + 2 * number + 1)
    first, span_rows = tl.load(chunks + 4 * first_chunk), tl.load(chunks + 4 * first_chunk + 2)
    slot = tl.load(slots + tl.load(chunks + 4 * first_chunk + 3)).to(tl.int64)
    at = tl.arange(0, ROWS)
    element, column = tl.arange(0, KEY_DIM), tl.program_id(0) * TILE + tl.arange(0, TILE)
    cell = head * (KEY_DIM * VALUE_DIM) + element[:, None] * VALUE_DIM + column[None, :]
    carried = h + slot * (VALUE_HEADS * KEY_DIM * VALUE_DIM) + cell
    state = tl.load(carried)
    dtype: tl.constexpr = states.dtype.element_ty
    k_offset = (KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM
    for c in range(count):
        rounded = state.to(dtype)
        tl.store(states + (first_chunk + c).to(tl.int64) * (VALUE_HEADS * KEY_DIM * VALUE_DIM) + cell, rounded)
        live = (c * ROWS + at < span_rows)[:, None]
        row = first.to(tl.int64) + c * ROWS + at
        pair = row[:, None] * VALUE_HEADS + head
        seen = tl.load(seen_keys + pair * KEY_DIM + element[None, :], mask=live, other=0.0)
        values_at = new_values + pair * VALUE_DIM + column[None, :]
        values = tl.load(values_at, mask=live, other=0.0).to(tl.float32)
        values -= tl.dot(seen, rounded, input_precision=PRECISION)
        tl.store(values_at, values.to(dtype), mask=live)
        last = first.to(tl.int64) + tl.minimum((c + 1) * ROWS, span_rows) - 1
        total = tl.load(decay + last * VALUE_HEADS + head)
        sums = tl.load(decay + row * VALUE_HEADS + head, mask=c * ROWS + at < span_rows, other=0.0)
        values *= tl.exp(tl.where(c * ROWS + at < span_rows, total - sums, 0.0))[:, None]
        keys = tl.load(inputs + row[:, None] * CHANNELS + k_offset + element[None, :], mask=live, other=0.0)
        state = tl.dot(tl.trans(keys), values.to(dtype), state * tl.exp(total), input_precision=PRECISION)
    tl.store(carried, state)


@triton.jit
def _output_kernel(
    inputs,
    projected,
    chunks,
    new_values,
    decay,
    states,
    norm,
    out,
    row_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    head, number = tl.program_id(0), tl.program_id(1)
    first, rows = _chunk(chunks, number, ROWS)
    at = tl.arange(0, ROWS)
    live = (at < rows)[:, None]
    row = (first + at)[:, None]
    element, column = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)[None, :]
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    queries = tl.load(inputs + row * CHANNELS + key_head * KEY_DIM + element[None, :], mask=live, other=0.0)
    keys = tl.load(inputs + row * CHANNELS + (KEY_HEADS + key_head) * KEY_DIM + element[None, :], mask=live, other=0.0)
    sums = tl.load(decay + (first + at) * VALUE_HEADS + head, mask=at < rows, other=0.0)
    cell = (number.to(tl.int64) * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + element[:, None] * VALUE_DIM + column
    result = tl.dot(queries, tl.load(states + cell), input_precision=PRECISION) * tl.exp(sums)[:, None]
    between = tl.where(live & (at[:, None] >= at[None, :]), sums[:, None] - sums[None, :], float("-inf"))
    within = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * tl.exp(between)
    values = tl.load(new_values + (row * VALUE_HEADS + head) * VALUE_DIM + column, mask=live, other=0.0)
    result = tl.dot(within.to(values.dtype), values, result, input_precision=PRECISION)
    result *= tl.rsqrt(tl.sum(result * result, 1) / VALUE_DIM + eps)[:, None] * tl.load(norm + column).to(tl.float32)
    z = tl.load(projected + row * row_stride + CHANNELS + head * VALUE_DIM + column, mask=live, other=0.0).to(tl.float32)
    to = row * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + column
    tl.store(out + to, (result * z * tl.sigmoid(z)).to(out.dtype.element_ty), mask=live)
