"""The router's choice as parts of kernels: softmax, and the k largest of each row, one warp to a row.

Shape letters as in `kernels.router_triton`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def experts_of_lanes(EXPERTS_POW2: tl.constexpr):
    """Numbers of experts, `[1, groups, LANES]`; 4 words of each lane of a warp are read at once."""
    lanes: tl.constexpr = 128 if EXPERTS_POW2 > 128 else EXPERTS_POW2
    return tl.arange(0, EXPERTS_POW2 // lanes)[None, :, None] * lanes + tl.arange(0, lanes)[None, None, :]


@triton.jit
def _sum_parts(place, part, live, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Logits at `place`: those of PARTS shares of the depth, `part` words apart, added in order; rounded to DTYPE. Past L1."""
    total = tl.load(place, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
    for number in tl.static_range(1, PARTS):
        total += tl.load(place + number * part, mask=live, other=0.0, cache_modifier=".cg")
    return total.to(DTYPE).to(tl.float32)


@triton.jit
def _most(keys):
    """The largest key of each row of `[rows, groups, LANES]`."""
    return tl.max(tl.max(keys, 1, keep_dims=True), 2, keep_dims=True)


@triton.jit
def choose(logits, expert, num_experts, TOP_K: tl.constexpr, LANES: tl.constexpr, NORMALISE: tl.constexpr, SHORT: tl.constexpr):
    """Experts and weights, the first TOP_K of `[rows, 1, LANES]`, of float32 logits `[rows, groups, LANES]`.

    `expert` `[1, groups, LANES]`. Choices have the layout of logits, though most lanes are idle: nothing moves between threads.
    A key holds the logit's bits, in an order that integers share with floats, above the complement of the expert: all keys differ,
    so even rows with NaN choose k different experts that exist, and equal logits go to the lower one. SHORT: the lower half of each
    logit is zero (a bfloat16), and the key fits 32 bits, whose largest of a warp is one instruction.
    """
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # -0.0 ties with 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    lowest: tl.constexpr = -0x80000000 if SHORT else -0x8000000000000000
    if SHORT:
        key = (ordered & -0x10000) | (0xFFFF - expert)
    else:
        key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - expert).to(tl.int64)
    key = tl.where(expert < num_experts, key, lowest)
    column = tl.arange(0, LANES)[None, None, :]
    largest = _most(key)
    best = largest
    chosen = tl.where(column == 0, best, lowest)
    for choice in tl.static_range(1, TOP_K):
        key = tl.where(key == best, lowest, key)
        best = _most(key)
        chosen = tl.where(column == choice, best, chosen)
    top = _logit_of(largest, SHORT)
    raised = tl.where(column < TOP_K, tl.exp(_logit_of(chosen, SHORT) - top), 0.0)
    if NORMALISE:
        total = tl.sum(raised, 2, keep_dims=True)
    else:
        every = tl.where(expert < num_experts, tl.exp(logits - top), 0.0)
        total = tl.sum(tl.sum(every, 1, keep_dims=True), 2, keep_dims=True)
    if SHORT:
        number = 0xFFFF - (chosen & 0xFFFF)
    else:
        number = 0x7FFFFFFF - (chosen & 0x7FFFFFFF).to(tl.int32)
    return number, raised / total


@triton.jit
def _logit_of(key, SHORT: tl.constexpr):
    """The logit that a key was made of."""
    if SHORT:
        high = key & -0x10000
        bits = high ^ ((high >> 31) & 0x7FFF0000)
    else:
        high = (key >> 32).to(tl.int32)
        bits = high ^ ((high >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def choose_rows(
    logits,
    part,
    row,
    live,
    expert,
    stride,
    num_experts,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    NORMALISE: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Experts and weights of `row` `[rows, 1, 1]` where it is live, in the first columns of `[rows, 1, LANES]`."""
    LANES: tl.constexpr = expert.shape[2]
    SHORT: tl.constexpr = tl.bfloat16 == DTYPE
    at = logits + row * stride
    # Told so, the compiler shares rows out to warps, not groups: a row lies in one warp, and no choice waits for another warp.
    place = tl.max_contiguous(at + expert, [2, 1, LANES])
    every = _sum_parts(place, part, live & (expert < num_experts), PARTS, DTYPE)
    if SHARED:
        gate = _sum_parts(at + num_experts, part, live, PARTS, DTYPE)
    chosen, weight = choose(every, expert, num_experts, TOP_K, LANES, NORMALISE, SHORT)
    if SHARED:
        last = tl.arange(0, LANES)[None, None, :] == TOP_K
        chosen = tl.where(last, (num_experts + row % SHARED).to(tl.int32), chosen)
        weight = tl.where(last, tl.sigmoid(gate), weight)
    return chosen, weight


@triton.jit
def pairs_of(row, LANES: tl.constexpr, COLUMNS: tl.constexpr):
    """The pairs' numbers `[rows, 1, LANES]`, and in which lanes there are any."""
    column = tl.arange(0, LANES)[None, None, :]
    return row * COLUMNS + column, column < COLUMNS


@triton.jit
def store_choices(weights, experts, chosen, weight, pair, here):
    """What `choose_rows` chose."""
    tl.store(weights + pair, weight, mask=here)
    tl.store(experts + pair, chosen, mask=here)
