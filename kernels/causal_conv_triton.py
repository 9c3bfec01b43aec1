"""The causal convolution of Gated DeltaNet over pieces of prompts on the GPU, and what queries and keys need after it.
 The same functions as `kernels.causal_conv.conv_piece` and `kernels.gated_delta.delta_inputs`, which are the specification. One
program takes a few rows of a chunk for one head. The program of a span's first rows is the only one that reads the carried
inputs, so that it also writes those to carry on.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.delta_plan import DeltaPlan
from kernels.gated_delta import CHUNK
from kernels.launch import Launch, bind, next_power_of_2

TILE_ROWS = 16
"""Rows of a program; the first one of a span holds every row that sees carried inputs."""


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
    if taps > TILE_ROWS:
        raise ValueError(f"a convolution over {taps} rows; at most {TILE_ROWS}")
    count = plan.chunks.shape[0]
    if count:
        launch = _conv(key_heads, key_dim, value_dim, channels, taps)
        grid = (2 * key_heads + value_heads, count, CHUNK // TILE_ROWS)
        launch(grid, projected, conv_state, slots, weight, plan.chunks, out, projected.stride(0))
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
        TAPS_POW2=next_power_of_2(taps - 1),
        SCALE=key_dim**-0.5,
        ROWS=TILE_ROWS,
        num_warps=4,
    )


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
):
    at = tl.arange(0, ROWS)[:, None]
    one = channel[None, :]
    total = tl.zeros([ROWS, channel.shape[0]], tl.float32)
    for tap in tl.static_range(TAPS):
        place = before + at - (TAPS - 1 - tap)
        x = tl.load(
            projected + (row + at - (TAPS - 1 - tap)) * row_stride + one, mask=(at < rows) & (place >= 0) & (one >= 0), other=0.0
        ).to(tl.float32)
        if before == 0:
            x += tl.load(state + one * (TAPS - 1) + (TAPS - 1) + place, mask=(at < rows) & (place < 0) & (one >= 0), other=0.0).to(
                tl.float32
            )
        total += x * tl.load(weight + one * TAPS + tap).to(tl.float32)
    total *= tl.sigmoid(total)
    if UNIT:
        total *= tl.rsqrt(tl.sum(total * total, 1) + 1e-6)[:, None] * factor
    tl.store(out + (row + at) * CHANNELS + one, total.to(out.dtype.element_ty), mask=(at < rows) & (one >= 0))
    if before == 0:
        kept = tl.arange(0, TAPS_POW2)[None, :]
        each = channel[:, None]
        source = span_rows - (TAPS - 1) + kept
        exists = (kept < TAPS - 1) & (each >= 0)
        old = tl.load(state + each * (TAPS - 1) + (TAPS - 1) + source, mask=exists & (source < 0), other=0.0)
        new = tl.load(projected + (row + source) * row_stride + each, mask=exists & (source >= 0), other=0.0)
        # Threads may hold copies of one channel: all have read its state before any writes it.
        tl.debug_barrier()
        tl.store(state + each * (TAPS - 1) + kept, tl.where(source < 0, old, new), mask=exists)


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
):
    part = tl.program_id(0)
    entry = chunks + 4 * tl.program_id(1)
    skipped = tl.program_id(2) * ROWS
    row = tl.load(entry).to(tl.int64) + skipped
    before, span_rows, span = tl.load(entry + 1) + skipped, tl.load(entry + 2), tl.load(entry + 3)
    rows = tl.minimum(span_rows - before, ROWS)
    if rows <= 0:
        return
    state = conv_state + tl.load(slots + span).to(tl.int64) * (CHANNELS * (TAPS - 1))
    if part < 2 * KEY_HEADS:
        k_channel = part * KEY_DIM + tl.arange(0, KEY_DIM)
        factor = tl.where(part < KEY_HEADS, SCALE, 1.0)
        _conv_head(
            projected, state, weight, out, row, rows, before, span_rows, k_channel, row_stride, factor,
            True, CHANNELS, TAPS, TAPS_POW2, ROWS,
        )  # fmt: skip
    else:
        v_channel = 2 * KEY_HEADS * KEY_DIM + (part - 2 * KEY_HEADS) * VALUE_DIM + tl.arange(0, VALUE_DIM)
        _conv_head(
            projected, state, weight, out, row, rows, before, span_rows, v_channel, row_stride, 1.0,
            False, CHANNELS, TAPS, TAPS_POW2, ROWS,
        )  # fmt: skip
