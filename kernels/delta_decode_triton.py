"""One token of each of many sequences through Gated DeltaNet on the GPU, in one kernel, on the slot-indexed pools.
 From the fused projection to the input of the output projection: convolution, unit queries and keys, gates, the delta rule and
the gated norm; the same functions as `kernels.causal_conv`, `kernels.gated_delta` and `kernels.rms_norm`, which are the
specification, with float32 arithmetic throughout. A program takes some columns of one value head's state, which is read and
written once. Whichever program of a key head's group ends last moves the shared inputs of the convolution on and normalises the
outputs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, bind, next_power_of_2


class DeltaWeights(NamedTuple):
    """A layer's small weights: conv `[channels, kernel]`, a_log and dt_bias `[value_heads]`, norm `[value_dim]`."""

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaDecodeConfig:
    """`tile` columns of a state a program."""

    tile: int = 32
    warps: int = 4


def default_delta_decode_config(value_dim: int) -> DeltaDecodeConfig:
    """Columns of 128 bytes: whole sectors, and enough programs for one sequence to fill the chip."""
    return DeltaDecodeConfig(tile=min(32, value_dim))


def delta_decode(
    projected: torch.Tensor,
    conv_state: torch.Tensor,
    h: torch.Tensor,
    slots: torch.Tensor,
    weights: DeltaWeights,
    turns: torch.Tensor,
    *,
    key_heads: int,
    rows: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: DeltaDecodeConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`[T, value_heads * value_dim]`, normed and gated, of rows `projected [T, channels + value width + 2 value_heads]`.
     The projection holds the convolution's channels (queries, keys, values), z, beta and decay inputs, in this order. Pools
    `conv_state [max_slots, channels, kernel - 1]` and `h [max_slots, value_heads, key_dim, value_dim]` float32 are updated in place
    for `slots` [n] int32, all different; a negative slot is idle: its row becomes zeros. Entry i is row i, or `rows[i]`; other rows
    are left as they are in `out`. `turns` int32 holds a zero for each (entry, key head), before and after. With `pdl` the kernel
    before this one in the stream must not write `h` or `slots`.
    """
    value_heads, key_dim, value_dim = h.shape[1:]
    channels = conv_state.shape[1]
    count = slots.shape[0]
    width = value_heads * value_dim
    check_delta(projected, conv_state, h, weights, key_heads)
    if turns.numel() < count * key_heads:
        raise ValueError(f"{turns.numel()} turns for {count} entries of {key_heads} heads")
    if out is None:
        out = torch.empty(projected.shape[0], width, dtype=projected.dtype, device=projected.device)
    if count == 0:
        return out
    config = config or default_delta_decode_config(value_dim)
    scratch = torch.empty(count, width, dtype=torch.float32, device=projected.device)
    _bound(config, key_heads, value_heads, key_dim, value_dim, channels, weights.conv.shape[1], pdl)(
        (value_dim // config.tile, value_heads, count),
        projected,
        conv_state,
        h,
        slots,
        rows,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        weights.norm,
        scratch,
        turns,
        out,
        projected.stride(0),
        weights.eps,
    )
    return out


@cache
def _bound(
    config: DeltaDecodeConfig,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    channels: int,
    taps: int,
    pdl: bool,
) -> Launch:
    return bind(
        _delta_decode_kernel,
        KEY_HEADS=key_heads,
        VALUE_HEADS=value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        CHANNELS=channels,
        TAPS=taps,
        TAPS_POW2=next_power_of_2(taps - 1),
        SCALE=key_dim**-0.5,
        TILE=config.tile,
        GROUP_POW2=next_power_of_2(value_heads // key_heads),
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


def check_delta(projected: torch.Tensor, conv_state: torch.Tensor, h: torch.Tensor, weights: DeltaWeights, key_heads: int) -> None:
    """Raise ValueError for layouts that the Gated DeltaNet kernels do not take."""
    value_heads, key_dim, value_dim = h.shape[1:]
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    taps = weights.conv.shape[1]
    if projected.shape[1] != channels + value_heads * value_dim + 2 * value_heads or value_heads % key_heads:
        raise ValueError(
            f"a projection of {projected.shape[1]} for {key_heads} and {value_heads} heads of {key_dim} and {value_dim}"
        )
    if conv_state.shape[1:] != (channels, taps - 1) or weights.conv.shape[0] != channels:
        raise ValueError(f"a convolution state {tuple(conv_state.shape)} for {channels} channels and {taps} taps")
    if any(size != next_power_of_2(size) for size in (key_dim, value_dim)) or h.dtype != torch.float32:
        raise ValueError(f"states of {key_dim} x {value_dim} {h.dtype}; sizes are powers of two, of float32")
    if projected.stride(1) != 1 or not all(x.is_contiguous() for x in (conv_state, h, weights.conv, weights.norm)):
        raise ValueError("pools, weights and rows must be contiguous")


@triton.jit
def _convolved(x, state, weight, channel, TAPS: tl.constexpr):
    """Float32 SiLU of the convolution of some channels of one row with the inputs before it."""
    total = tl.load(x + channel).to(tl.float32)
    total *= tl.load(weight + channel * TAPS + (TAPS - 1)).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        before = tl.load(state + channel * (TAPS - 1) + tap).to(tl.float32)
        total += before * tl.load(weight + channel * TAPS + tap).to(tl.float32)
    return total * tl.sigmoid(total)


@triton.jit
def _moved_on(x, state, channel, TAPS: tl.constexpr, TAPS_POW2: tl.constexpr):
    """The carried inputs of some channels after this row `[channels, TAPS_POW2]`, where they go, and which of them exist."""
    tap = tl.arange(0, TAPS_POW2)[None, :]
    target = state + channel[:, None] * (TAPS - 1) + tap
    exists = (channel[:, None] >= 0) & (tap < TAPS - 1)
    later = tl.load(target + 1, mask=(channel[:, None] >= 0) & (tap < TAPS - 2), other=0.0)
    newest = tl.load(x + channel)
    return tl.where(tap == TAPS - 2, newest[:, None], later), target, exists


@triton.jit
def _delta_decode_kernel(
    projected,
    conv_state,
    h,
    slots,
    rows,
    conv_weight,
    a_log,
    dt_bias,
    norm_weight,
    scratch,
    turns,
    out,
    row_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_POW2: tl.constexpr,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    WIDTH: tl.constexpr = VALUE_HEADS * VALUE_DIM
    head, entry = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + entry).to(tl.int64)
    row = entry
    if rows is not None:
        row = tl.load(rows + entry).to(tl.int64)
    out += row * WIDTH
    key_head = head // GROUP
    element = tl.arange(0, KEY_DIM)
    cell = (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + element[:, None] * VALUE_DIM + column[None, :]
    # The kernel before does not write states, so that their loads start before it ends.
    state = tl.load(h + cell, mask=column[None, :] < tl.where(slot >= 0, VALUE_DIM, 0), other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if slot < 0:
        tl.store(out + head * VALUE_DIM + column, tl.zeros([TILE], out.dtype.element_ty))
        return
    x = projected + row * row_stride
    carried = conv_state + slot * (CHANNELS * (TAPS - 1))
    q_channel = key_head * KEY_DIM + element
    k_channel = q_channel + KEY_HEADS * KEY_DIM
    v_channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
    query = _convolved(x, carried, conv_weight, q_channel, TAPS)
    key = _convolved(x, carried, conv_weight, k_channel, TAPS)
    value = _convolved(x, carried, conv_weight, v_channel, TAPS)
    after, target, exists = _moved_on(x, carried, v_channel, TAPS, TAPS_POW2)
    query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * SCALE
    key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    beta = tl.sigmoid(tl.load(x + CHANNELS + WIDTH + head).to(tl.float32))
    step = tl.load(x + CHANNELS + WIDTH + VALUE_HEADS + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    softplus = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    decay = tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * softplus)
    state *= decay
    correction = (value - tl.sum(state * key[:, None], 0)) * beta
    state += key[:, None] * correction[None, :]
    tl.store(h + cell, state)
    result = tl.sum(state * query[:, None], 0)
    tl.store(scratch + entry * WIDTH + head * VALUE_DIM + column, result)
    # Threads may hold copies of one channel: all have read its state before any writes it.
    tl.debug_barrier()
    tl.store(target, after, mask=exists)
    turn = turns + entry * KEY_HEADS + key_head
    if tl.atomic_add(turn, 1, sem="acq_rel") == GROUP * (VALUE_DIM // TILE) - 1:
        tl.store(turn, 0)
        q_after, q_target, carries = _moved_on(x, carried, q_channel, TAPS, TAPS_POW2)
        k_after, k_target, carries = _moved_on(x, carried, k_channel, TAPS, TAPS_POW2)
        tl.debug_barrier()
        tl.store(q_target, q_after, mask=carries)
        tl.store(k_target, k_after, mask=carries)
        member = tl.arange(0, GROUP_POW2)[:, None]
        here = member < GROUP
        at = tl.arange(0, VALUE_DIM)[None, :]
        element_of = (key_head * GROUP + member) * VALUE_DIM + at
        mine = tl.load(scratch + entry * WIDTH + element_of, mask=here, other=0.0, cache_modifier=".cg")
        z = tl.load(x + CHANNELS + element_of, mask=here, other=0.0).to(tl.float32)
        mine *= tl.rsqrt(tl.sum(mine * mine, 1) / VALUE_DIM + eps)[:, None] * tl.load(norm_weight + at).to(tl.float32)
        tl.store(out + element_of, (mine * z * tl.sigmoid(z)).to(out.dtype.element_ty), mask=here)
