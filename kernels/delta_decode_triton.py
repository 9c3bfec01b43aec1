"""One token of each of many sequences through Gated DeltaNet on the GPU, in one kernel, on the slot-indexed pools.
 From the fused projection to the input of the output projection: convolution, unit queries and keys, gates, the delta rule and
the gated norm; the same functions as `kernels.causal_conv`, `kernels.gated_delta` and `kernels.rms_norm`, which are the
specification, with float32 arithmetic throughout. A program takes one value head of one sequence and holds its state in registers:
read and written once, in rows of whole lines. All that it reads is asked for at once, so that it lives little longer than one
access of memory takes; what a program waits for is what the memory idles.
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
    """`warps` of a program, each with some rows of `columns` columns of a state (0: of all), and at most `registers` a thread.

    All are powers of two; warps beside each other, `value_dim // columns`, are at most all. Fewer columns leave less to add up
    between warps, more make longer stretches of memory.
    """

    warps: int
    columns: int = 0
    registers: int | None = None


MANY_ENTRIES = 256
"""From here on a state is shared out to warps that have half of its columns each (measured: 3 % less time)."""


def default_delta_decode_config(key_dim: int, value_dim: int, entries: int) -> DeltaDecodeConfig:
    """128 elements of the state a thread: with 128 x 128 and few entries, a channel each; two programs on a multiprocessor."""
    warps = min(max(key_dim * value_dim // 4096, 1), 32)
    columns = value_dim // 2 if entries >= MANY_ENTRIES and warps > 1 else 0
    return DeltaDecodeConfig(warps=warps, columns=columns, registers=min(240, 65536 // (32 * warps)))


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
    before this one in the stream must write nothing that is read here but `projected`.
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
    # Beside pieces it is the same for any number, so that one kernel is compiled ahead.
    config = config or default_delta_decode_config(key_dim, value_dim, count if rows is None else 1)
    _bound(config, key_heads, value_heads, key_dim, value_dim, channels, weights.conv.shape[1], pdl)(
        (value_heads, count, 1),
        projected,
        conv_state,
        h,
        slots,
        rows,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        weights.norm,
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
        SCALE=key_dim**-0.5,
        WARPS=config.warps,
        COLUMNS=config.columns or value_dim,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
        maxnreg=config.registers,
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
def _carried(state, channel, TAPS: tl.constexpr):
    """The inputs of some channels before this row, oldest first, as the pool holds them."""
    inputs = (tl.load(state + channel * (TAPS - 1)),)
    for tap in tl.static_range(1, TAPS - 1):
        inputs = inputs + (tl.load(state + channel * (TAPS - 1) + tap),)  # type: ignore[assignment]  # noqa: RUF005
    return inputs


@triton.jit
def _of_carried(inputs, weight, channel, TAPS: tl.constexpr):
    """What the convolution of some channels sums over the inputs before this row, and the newest input's factor, in float32."""
    total = inputs[0].to(tl.float32) * tl.load(weight + channel * TAPS).to(tl.float32)
    for tap in tl.static_range(1, TAPS - 1):
        total += inputs[tap].to(tl.float32) * tl.load(weight + channel * TAPS + tap).to(tl.float32)
    return total, tl.load(weight + channel * TAPS + (TAPS - 1)).to(tl.float32)


@triton.jit
def _activated(newest, before, factor):
    """SiLU of the convolution."""
    total = before + newest.to(tl.float32) * factor
    return total * tl.sigmoid(total)


@triton.jit
def _move_on(state, channel, inputs, newest, TAPS: tl.constexpr):
    """Drop the oldest carried input of some channels, append the newest."""
    for tap in tl.static_range(TAPS - 2):
        tl.store(state + channel * (TAPS - 1) + tap, inputs[tap + 1])
    tl.store(state + channel * (TAPS - 1) + (TAPS - 2), newest)


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _places(
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, WARPS_DOWN: tl.constexpr, WARPS_ACROSS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Rows and columns of a state's elements, as a matrix `[ROWS * WARPS * LANES, COLUMNS]`."""
    part = tl.arange(0, ROWS * WARPS * LANES)[:, None]
    at_row = (part % LANES * WARPS_DOWN + part // (LANES * WARPS_ACROSS) % WARPS_DOWN) * ROWS + part // (LANES * WARPS)
    return at_row, part // LANES % WARPS_ACROSS * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _beside_rows(vector, element, ROWS: tl.constexpr, WARPS_DOWN: tl.constexpr, LANES: tl.constexpr):
    """A query or key, one element beside each row of a state. A gather keeps its operand's layout, one channel a thread, from
    being that of the state, many a thread."""
    return tl.permute(tl.reshape(tl.gather(vector, element, 0), [LANES, WARPS_DOWN, ROWS]), (2, 1, 0))[:, :, None, :, None]


@triton.jit
def _beta_and_decay(x, head, rate, bias, VALUE_HEADS: tl.constexpr):
    """How much of a correction is written, and what is left of the state; `x` is where the inputs of both begin."""
    beta = tl.sigmoid(tl.load(x + head).to(tl.float32))
    step = tl.load(x + VALUE_HEADS + head).to(tl.float32) + bias
    return beta, tl.exp(rate * tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0)))))


@triton.jit
def _delta_rule(state, query, key, value, q_unit, k_unit, both, beta, decay):
    """The new state and what the query reads from it. With S the state before, a the decay and u the correction, the new state's
    S' q is a S q + u (k q): one sum over rows."""
    of_key, of_query = tl.reduce((state * key, state * query), 0, _add_two)
    of_key, of_query = tl.reduce((of_key, of_query), 2, _add_two)
    of_key, of_query = tl.reduce((of_key, of_query), 0, _add_two)
    correction = (value - decay * k_unit * of_key) * beta
    result = decay * q_unit * of_query + both * q_unit * k_unit * correction
    return state * decay + key * (k_unit * correction)[None, None, :, None, :], result


@triton.jit
def _count_in(turn, thread, squares):
    """How many have counted before, for thread 0. A program counts with what its sums of squares give (always 1), which waits for
    the loads and for nothing else. The answer stays with one thread until it is needed; a scalar's would be awaited here."""
    one = tl.where(squares < 0.0, 2, 1)
    return tl.atomic_add(turn + thread, one, mask=thread == 0, sem="relaxed")


@triton.jit
def _store_out(out, result, norm, z, eps, VALUE_DIM: tl.constexpr):
    """What the query read, normalised and through its gate."""
    scale = tl.rsqrt(tl.sum(tl.sum(result * result, 1), 0) / VALUE_DIM + eps)
    result = tl.reshape(result, [VALUE_DIM]) * (norm * z * tl.sigmoid(z)) * scale
    tl.store(out, result.to(out.dtype.element_ty))


@triton.jit
def _delta_decode_kernel(
    projected, conv_state, h, slots, rows, conv_weight, a_log, dt_bias, norm_weight, turns, out, row_stride, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, SCALE: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    WIDTH: tl.constexpr = VALUE_HEADS * VALUE_DIM
    head, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // GROUP
    slot = tl.load(slots + entry).to(tl.int64)
    held = tl.maximum(slot, 0)
    element, column = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    q_channel = key_head * KEY_DIM + element
    k_channel = q_channel + KEY_HEADS * KEY_DIM
    v_channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
    carried = conv_state + held * (CHANNELS * (TAPS - 1))
    # A state as [ROWS, WARPS_DOWN, WARPS_ACROSS, LANES, COLUMNS]: a thread has 16 bytes of each of ROWS rows, so that sums over
    # rows begin within it. As a matrix, whose layout leaves the compiler no choice: neighbouring threads take neighbouring parts.
    WARPS_ACROSS: tl.constexpr = VALUE_DIM // COLUMNS
    WARPS_DOWN: tl.constexpr = WARPS // WARPS_ACROSS
    LANES: tl.constexpr = min(KEY_DIM // WARPS_DOWN, max(1, 128 // COLUMNS))
    ROWS: tl.constexpr = KEY_DIM // (LANES * WARPS_DOWN)
    at_row, at_column = _places(COLUMNS, ROWS, WARPS, WARPS_DOWN, WARPS_ACROSS, LANES)
    cell = h + (held * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + at_row * VALUE_DIM + at_column
    # The kernel before writes neither pools nor weights, so that their loads start before it ends.
    q_inputs = _carried(carried, q_channel, TAPS)
    k_inputs = _carried(carried, k_channel, TAPS)
    v_inputs = _carried(carried, v_channel, TAPS)
    q_before, q_factor = _of_carried(q_inputs, conv_weight, q_channel, TAPS)
    k_before, k_factor = _of_carried(k_inputs, conv_weight, k_channel, TAPS)
    v_before, v_factor = _of_carried(v_inputs, conv_weight, v_channel, TAPS)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    norm = tl.load(norm_weight + column).to(tl.float32)
    state = tl.load(cell, mask=at_column < tl.where(slot >= 0, VALUE_DIM, 0), other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = entry
    if rows is not None:
        row = tl.load(rows + entry).to(tl.int64)
    out += row * WIDTH + head * VALUE_DIM + column
    if slot < 0:
        tl.store(out, tl.zeros([VALUE_DIM], out.dtype.element_ty))
        return
    x = projected + row * row_stride
    q_newest, k_newest, v_newest = tl.load(x + q_channel), tl.load(x + k_channel), tl.load(x + v_channel)
    z = tl.load(x + CHANNELS + head * VALUE_DIM + column).to(tl.float32)
    beta, decay = _beta_and_decay(x + CHANNELS + WIDTH, head, rate, bias, VALUE_HEADS)
    query, key = _activated(q_newest, q_before, q_factor), _activated(k_newest, k_before, k_factor)
    q_square, k_square, both = tl.reduce((query * query, key * key, query * key), 0, _add_three)
    q_unit, k_unit = tl.rsqrt(q_square + 1e-6) * SCALE, tl.rsqrt(k_square + 1e-6)
    # Whichever program of a key head comes last moves its inputs on. All it has to know is that the others have theirs.
    turn, thread = turns + entry * KEY_HEADS + key_head, tl.arange(0, 32 * WARPS)
    earlier = _count_in(turn, thread, q_square + k_square)
    query = _beside_rows(query, element, ROWS, WARPS_DOWN, LANES)
    key = _beside_rows(key, element, ROWS, WARPS_DOWN, LANES)
    value = tl.reshape(tl.gather(_activated(v_newest, v_before, v_factor), column, 0), [WARPS_ACROSS, COLUMNS])
    state = tl.reshape(state, [ROWS, WARPS_DOWN, WARPS_ACROSS, LANES, COLUMNS])
    state, result = _delta_rule(state, query, key, value, q_unit, k_unit, both, beta, decay)
    tl.store(cell, tl.reshape(state, [ROWS * WARPS * LANES, COLUMNS]))
    _store_out(out, result, norm, z, eps, VALUE_DIM)
    # Threads may hold copies of one channel: all have read its inputs before any writes them.
    tl.debug_barrier()
    _move_on(carried, v_channel, v_inputs, v_newest, TAPS)
    if tl.sum(tl.where(thread == 0, earlier, 0), 0) == GROUP - 1:
        tl.store(turn, 0)
        _move_on(carried, q_channel, q_inputs, q_newest, TAPS)
        _move_on(carried, k_channel, k_inputs, k_newest, TAPS)
