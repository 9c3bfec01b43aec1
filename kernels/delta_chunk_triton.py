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
    """How the three kernels are scheduled; `tile` columns of a state stay in one program from chunk to chunk.

    `registers` is the most that a thread of the first kernel has.
    """

    tile: int = 32
    state_warps: int = 4
    state_stages: int = 3
    chunk_warps: int = 4
    registers: int | None = None
    output_warps: int = 8


def default_chunk_config(value_dim: int, dtype: torch.dtype) -> DeltaChunkConfig:
    """With 128 x 128 in 16 bits, programs on a multiprocessor: three of the first kernel, two of each other."""
    if dtype == torch.float32:
        return DeltaChunkConfig(tile=min(32, value_dim), state_stages=2)
    return DeltaChunkConfig(tile=min(32, value_dim), registers=168)


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
    config = config or default_chunk_config(value_dim, projected.dtype)
    inputs = conv_pieces(
        projected, conv_state, slots, weights.conv, plan, key_heads=key_heads, value_heads=value_heads, value_dim=value_dim
    )
    seen_keys = torch.empty(rows, value_heads, key_dim, dtype=projected.dtype, device=projected.device)
    new_values = torch.empty(rows, value_heads, value_dim, dtype=projected.dtype, device=projected.device)
    decay = torch.empty(count, value_heads, CHUNK, dtype=torch.float32, device=projected.device)
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
        bind(_chunk_kernel, **shape, num_warps=config.chunk_warps, maxnreg=config.registers),
        bind(_state_kernel, **shape, **state),
        bind(_output_kernel, **shape, PART=min(64, key_dim), num_warps=config.output_warps),
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
    for step in tl.static_range(15):
        factor = tl.sum(tl.where(j == step, blocks, 0.0), 2)
        done = tl.sum(tl.where(i == step, inverse, 0.0), 1)
        inverse -= factor[:, :, None] * done[:, None, :]
    x = tl.reshape(tl.where(over == across, inverse[:, :, None, :], 0.0), [ROWS, ROWS])
    for size in tl.static_range(1, BLOCKS):
        # Pairs of 1, 2, 4 .. blocks: the powers of two below the number of blocks.
        if (size & (size - 1)) == 0:
            pair = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
            below = tl.dot(x, lower, input_precision=PRECISION)
            x -= tl.where(pair, tl.dot(below, x, input_precision=PRECISION), 0.0)
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
    head, number = tl.program_id(0), tl.program_id(1)
    first, rows = _chunk(chunks, number, ROWS)
    at = tl.arange(0, ROWS)
    live = at < rows
    down = at[:, None]
    element, column = tl.arange(0, KEY_DIM)[None, :], tl.arange(0, VALUE_DIM)[None, :]
    inputs += first * CHANNELS
    k_at = inputs + (KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM + down * CHANNELS + element
    v_at = inputs + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + down * CHANNELS + column
    keys = tl.load(k_at, mask=live[:, None], other=0.0)
    values = tl.load(v_at, mask=live[:, None], other=0.0)
    # Both gates of a row at once; a sum is not made anew for each way that threads hold beta, as a load would be.
    gate = tl.arange(0, 2)[None, :]
    gates_at = projected + first * row_stride + CHANNELS + VALUE_HEADS * VALUE_DIM + head + down * row_stride + gate * VALUE_HEADS
    gates = tl.load(gates_at, mask=live[:, None], other=0.0).to(tl.float32)
    beta = tl.sum(tl.where(live[:, None] & (gate == 0), tl.sigmoid(gates), 0.0), 1)
    step = tl.sum(tl.where(gate == 1, gates, 0.0), 1) + tl.load(dt_bias + head).to(tl.float32)
    softplus = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    g = tl.where(live, -tl.exp(tl.load(a_log + head).to(tl.float32)) * softplus, 0.0)
    sums = tl.cumsum(g, 0)
    tl.store(decay + (number.to(tl.int64) * VALUE_HEADS + head) * ROWS + at, sums)
    between = tl.where(at[:, None] > at[None, :], sums[:, None] - sums[None, :], float("-inf"))
    lower = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * beta[:, None] * tl.exp(between)
    inverse = _unit_inverse(lower, ROWS, PRECISION) * beta[None, :]
    # Factors of rows of keys and values are factors of the inverse's columns.
    pair = first * VALUE_HEADS + head
    solved = tl.dot(inverse.to(values.dtype), values, input_precision=PRECISION)
    to = new_values + pair * VALUE_DIM + down * (VALUE_HEADS * VALUE_DIM) + column
    tl.store(to, solved.to(values.dtype), mask=live[:, None])
    inverse *= tl.exp(sums)[None, :]
    solved = tl.dot(inverse.to(keys.dtype), keys, input_precision=PRECISION)
    to = seen_keys + pair * KEY_DIM + down * (VALUE_HEADS * KEY_DIM) + element
    tl.store(to, solved.to(keys.dtype), mask=live[:, None])


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
    lane = tl.arange(0, ROWS)[:, None]
    values_at = new_values + ((first.to(tl.int64) + lane) * VALUE_HEADS + head) * VALUE_DIM + column[None, :]
    # Asked for a chunk ahead, as the loop's stages ask for the rest.
    ahead = tl.load(values_at, mask=lane < span_rows, other=0.0)
    for c in range(count):
        rounded = state.to(dtype)
        tl.store(states + (first_chunk + c).to(tl.int64) * (VALUE_HEADS * KEY_DIM * VALUE_DIM) + cell, rounded)
        done = c * ROWS
        row = first.to(tl.int64) + done + lane
        seen = tl.load(seen_keys + (row * VALUE_HEADS + head) * KEY_DIM + element[None, :], mask=done + lane < span_rows, other=0.0)
        values = ahead.to(tl.float32)
        ahead_at = values_at + (ROWS * VALUE_HEADS * VALUE_DIM)
        ahead = tl.load(ahead_at, mask=done + ROWS + lane < span_rows, other=0.0)
        values -= tl.dot(seen, rounded, input_precision=PRECISION)
        tl.store(values_at, values.to(dtype), mask=done + lane < span_rows)
        values_at = ahead_at
        # Sums of rows behind the last one are as its own.
        sums_at = decay + ((first_chunk + c).to(tl.int64) * VALUE_HEADS + head) * ROWS
        total = tl.load(sums_at + ROWS - 1)
        values *= tl.exp(total - tl.load(sums_at + at))[:, None]
        keys = tl.load(inputs + row * CHANNELS + k_offset + element[None, :], mask=done + lane < span_rows, other=0.0)
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
    PART: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    head, number = tl.program_id(0), tl.program_id(1)
    first, rows = _chunk(chunks, number, ROWS)
    at = tl.arange(0, ROWS)
    live = (at < rows)[:, None]
    down = at[:, None]
    part, column = tl.arange(0, PART), tl.arange(0, VALUE_DIM)[None, :]
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    pair = number.to(tl.int64) * VALUE_HEADS + head
    q_at = inputs + first * CHANNELS + key_head * KEY_DIM + down * CHANNELS + part[None, :]
    state_at = states + pair * (KEY_DIM * VALUE_DIM) + part[:, None] * VALUE_DIM + column
    sums = tl.load(decay + pair * ROWS + at)
    new_values += (first * VALUE_HEADS + head) * VALUE_DIM
    out += (first * VALUE_HEADS + head) * VALUE_DIM
    along = down * (VALUE_HEADS * VALUE_DIM) + column
    values_at = new_values + along
    z_at = projected + first * row_stride + CHANNELS + head * VALUE_DIM + down * row_stride + column
    values, z = tl.load(values_at, mask=live, other=0.0), tl.load(z_at, mask=live, other=0.0)
    result, within = tl.zeros([ROWS, VALUE_DIM], tl.float32), tl.zeros([ROWS, ROWS], tl.float32)
    for element in tl.range(0, KEY_DIM, PART, num_stages=3):
        queries = tl.load(q_at + element, mask=live, other=0.0)
        keys = tl.load(q_at + KEY_HEADS * KEY_DIM + element, mask=live, other=0.0)
        result = tl.dot(queries, tl.load(state_at + element * VALUE_DIM), result, input_precision=PRECISION)
        within = tl.dot(queries, tl.trans(keys), within, input_precision=PRECISION)
    result *= tl.exp(sums)[:, None]
    within *= tl.exp(tl.where(at[:, None] >= at[None, :], sums[:, None] - sums[None, :], float("-inf")))
    # Put aside only now: all that is read was asked for before.
    values = tl.where(live, values, 0.0)
    result = tl.dot(within.to(values.dtype), values, result, input_precision=PRECISION)
    result *= tl.rsqrt(tl.sum(result * result, 1) / VALUE_DIM + eps)[:, None] * tl.load(norm + column).to(tl.float32)
    z = z.to(tl.float32)
    tl.store(out + along, (result * z * tl.sigmoid(z)).to(out.dtype.element_ty), mask=live)
