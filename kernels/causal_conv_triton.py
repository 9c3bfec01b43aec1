"""The causal convolution of Gated DeltaNet over pieces of prompts on the GPU, and what queries and keys need after it.
 The same functions as `kernels.causal_conv.conv_piece` and `kernels.gated_delta.delta_inputs`, which are the specification. One
program takes a few rows of a chunk for one head. The program of a span's first rows is the only one that reads the carried
inputs, so that it also writes those to carry on.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, unreachable, var-annotated"
# Parameters of kernels are pointers and scalars of the device, which have no Python type; their tuples grow as loops are unrolled.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.delta_plan import DeltaPlan
from kernels.gated_delta import CHUNK
from kernels.launch import Launch, bind, next_power_of_2

STEPS = 8
"""Rows that a thread walks down."""


def conv_pieces(
    projected: torch.Tensor,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    plan: DeltaPlan,
    *,
    key_heads: int,
    value_heads: int,
    value_dim: int,
) -> torch.Tensor:
    """Scaled unit queries, unit keys and values `[T, channels]`, of rows whose first `channels` elements are the projection's.

    conv_state `[max_slots, channels, kernel - 1]` is updated in place for the plan's spans, whose slots are `slots[span]`.
    Other rows of the result are left unwritten.
    """
    channels, taps = weight.shape
    key_dim = (channels - value_heads * value_dim) // (2 * key_heads)
    out = torch.empty(projected.shape[0], channels, dtype=projected.dtype, device=projected.device)
    if taps - 1 > STEPS:
        raise ValueError(f"a convolution over {taps} rows; at most {STEPS + 1}")
    count = plan.chunks.shape[0]
    if count:
        launch = _conv(key_heads, key_dim, value_dim, channels, taps)
        launch((2 * key_heads + value_heads, count, 1), projected, conv_state, slots, weight, plan.chunks, out, projected.stride(0))
    return out


@cache
def _conv(key_heads: int, key_dim: int, value_dim: int, channels: int, taps: int) -> Launch:
    return bind(
        _conv_kernel,
        KEY_HEADS=key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        CHANNELS=channels,
        TAPS=taps,
        TAPS_POW2=next_power_of_2(taps),
        SCALE=key_dim**-0.5,
        ROWS=CHUNK,
        STEPS=STEPS,
        num_warps=4,
    )


@triton.jit
def _column(tile, places, place):
    """A column of a tile that a thread holds rows of, as a row."""
    return tl.sum(tl.where(places == place, tile, 0.0), 1)[None, :]


@triton.jit
def _conv_head(
    projected,
    state,
    weight,
    out,
    row,
    rows,
    before,
    span_rows,
    channel,
    row_stride,
    factor,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_POW2: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Threads walk down STEPS rows each, with the rows that they last read in registers: a window for each row's sum."""
    tap = tl.arange(0, TAPS_POW2)[None, :]
    start = tl.arange(0, ROWS // STEPS)[:, None] * STEPS
    one = channel[None, :]
    source, to = projected + row * row_stride + start * row_stride + one, out + row * CHANNELS + start * CHANNELS + one
    read, factors, window = (), (), ()
    for step in tl.static_range(1 - TAPS, STEPS):
        at = start + step
        read += (tl.load(source + step * row_stride, mask=(at < rows) & (before + at >= 0), other=0.0),)
    # Read as it lies, then a row for each tap: single taps would be read an element at a time.
    weights = tl.load(weight + channel[:, None] * TAPS + tap, mask=tap < TAPS, other=0.0).to(tl.float32)
    for place in tl.static_range(TAPS):
        factors += (_column(weights, tap, place),)
    for place in tl.static_range(TAPS - 1):
        x = read[place].to(tl.float32)
        if before == 0:
            carried = tl.load(state + channel[:, None] * (TAPS - 1) + tap, mask=tap < TAPS - 1, other=0.0).to(tl.float32)
            x = tl.where(start + place < TAPS - 1, _column(carried, tap, place), x)
        window += (x,)
    for step in tl.static_range(STEPS):
        window += (read[TAPS - 1 + step].to(tl.float32),)
        total = window[step] * factors[0]
        for place in tl.static_range(1, TAPS):
            total += window[step + place] * factors[place]
        total /= 1.0 + tl.exp(-total)
        if UNIT:
            total *= tl.rsqrt(tl.sum(total * total, 1) + 1e-6)[:, None] * factor
        tl.store(to + step * CHANNELS, total.to(out.dtype.element_ty), mask=start + step < rows)
    if before == 0:
        kept = tl.arange(0, TAPS_POW2)[None, :]
        each = channel[:, None]
        last = span_rows - (TAPS - 1) + kept
        exists = kept < TAPS - 1
        old = tl.load(state + each * (TAPS - 1) + (TAPS - 1) + last, mask=exists & (last < 0), other=0.0)
        new = tl.load(projected + (row + last) * row_stride + each, mask=exists & (last >= 0), other=0.0)
        # Threads may hold copies of one channel: all have read its state before any writes it.
        tl.debug_barrier()
        tl.store(state + each * (TAPS - 1) + kept, tl.where(last < 0, old, new), mask=exists)


@triton.jit
def _conv_kernel(
    projected,
    conv_state,
    slots,
    weight,
    chunks,
    out,
    row_stride,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_POW2: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    part = tl.program_id(0)
    entry = chunks + 4 * tl.program_id(1)
    row, before = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    span_rows, span = tl.load(entry + 2), tl.load(entry + 3)
    rows = tl.minimum(span_rows - before, ROWS)
    state = conv_state + tl.load(slots + span).to(tl.int64) * (CHANNELS * (TAPS - 1))
    if part < 2 * KEY_HEADS:
        k_channel = part * KEY_DIM + tl.arange(0, KEY_DIM)
        factor = tl.where(part < KEY_HEADS, SCALE, 1.0)
        _conv_head(
            projected, state, weight, out, row, rows, before, span_rows, k_channel, row_stride, factor,
            True, CHANNELS, TAPS, TAPS_POW2, ROWS, STEPS,
        )  # fmt: skip
    else:
        v_channel = 2 * KEY_HEADS * KEY_DIM + (part - 2 * KEY_HEADS) * VALUE_DIM + tl.arange(0, VALUE_DIM)
        _conv_head(
            projected, state, weight, out, row, rows, before, span_rows, v_channel, row_stride, 1.0,
            False, CHANNELS, TAPS, TAPS_POW2, ROWS, STEPS,
        )  # fmt: skip
