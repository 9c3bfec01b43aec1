"""Expert choice on the GPU: softmax and the k largest of each row, in steps of decoding by the kernel that makes the logits, too.

Shape letters: T rows, H hidden, E experts of the model, k choices a row. Ties go to the lower expert. All ranks get the same bits.

A shared expert that `shared` ranks hold is one more choice of every row: its gate is one more row of the router (row E), and rank
`t % shared` runs it for row t. The outputs have `k + 1` columns then; the last one holds expert `E + t % shared`, and the sigmoid
of the gate's logit. It takes no part in the choice, nor in the softmax.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch.nn import functional

from kernels.grouping import Groups, empty_groups, group_in_program
from kernels.grouping_few import COMPARED_PAIRS, clear_counts, group_compared
from kernels.launch import Launch, bind, cdiv, next_power_of_2

FUSED_ROWS = 128
"""Up to this many rows the router's product runs in the same kernel as the choice."""

BLOCK_ROWS = 16
"""Rows of a program where there is more than one row: the least that a matrix product takes."""

OUTPUTS = 8
"""Logits that such a program makes of each of its rows."""

PROGRAMS = 132
"""Where there would be more programs than an H200 has multiprocessors, cuBLAS and a kernel after it are faster (measured)."""

COUNTERS = 1 + FUSED_ROWS // BLOCK_ROWS
"""Words that `route_rows` counts in."""


def route_logits(
    logits: torch.Tensor, top_k: int, normalise: bool, *, shared: int = 0, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights `[T, k]` float32 and experts `[T, k]` int32, largest first, of logits `[T, E]`; softmax in float32.

    Normalised weights sum to 1: that is the softmax of the chosen logits alone. With `shared`, logits are `[T, E + 1]`, outputs
    `[T, k + 1]` (see the module).
    """
    rows, num_experts = logits.shape[0], logits.shape[1] - (shared > 0)
    weights, experts = _empty_choices(rows, top_k + (shared > 0), logits.device)
    if rows:
        launch = _choice(num_experts, top_k, normalise, shared, logits.dtype, pdl)
        launch((rows, 1, 1), logits, weights, experts, logits.stride(0), num_experts)
    return weights, experts


@cache
def _choice(num_experts: int, top_k: int, normalise: bool, shared: int, dtype: torch.dtype, pdl: bool) -> Launch:
    return bind(
        _choose_kernel,
        TOP_K=top_k,
        EXPERTS_POW2=next_power_of_2(max(num_experts, top_k + (shared > 0))),
        NORMALISE=normalise,
        SHARED=shared,
        SHORT=dtype == torch.bfloat16,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


def router_logits(x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x [T, H] @ router [E, H]^T + bias`, `[T, E]` by the library, rows beginning at multiples of 16 elements.

    A shared expert's gate makes E odd, and the library has its fast kernels for rows of whole 16 bytes.
    """
    lines = router.shape[0]
    if lines % 16 == 0:
        logits = functional.linear(x, router)
    else:
        logits = x.new_empty(x.shape[0], cdiv(lines, 16) * 16)[:, :lines]
        torch.mm(x, router.T, out=logits)
    return logits if bias is None else logits.add_(bias)


def route_rows(
    x: torch.Tensor,
    router: torch.Tensor,
    top_k: int,
    normalise: bool,
    turns: torch.Tensor,
    local: torch.Tensor | None = None,
    held: int = 0,
    block_rows: int = 0,
    *,
    shared: int = 0,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, Groups | None]:
    """`route_logits` of `x [T, H] @ router [E, H]^T`, for T up to FUSED_ROWS; logits are rounded to x's dtype.

    If it takes no more than PROGRAMS, all is one kernel, and with `block_rows` the pairs are grouped, too, as by `group_pairs` with
    `local` and `held`. `turns` [COUNTERS] int32 is zero before and after: programs count themselves in it, and the last one of some
    rows chooses. Launches that share it must not overlap. With `shared` the router is `[E + 1, H]`.
    """
    rows, hidden = x.shape
    lines, columns = router.shape[0], top_k + (shared > 0)
    num_experts = lines - (shared > 0)
    if not 1 <= rows <= FUSED_ROWS:
        raise ValueError(f"{rows} rows; the router's product is fused for 1 to {FUSED_ROWS}")
    if not (x.is_contiguous() and router.is_contiguous()):
        raise ValueError("x and the router's weight must be contiguous")
    block, warps, outputs = (1, 4, 4) if rows == 1 else (BLOCK_ROWS, 8, OUTPUTS)
    grid = (triton.cdiv(lines, outputs), triton.cdiv(rows, block))
    if rows > 1 and grid[0] * grid[1] > PROGRAMS:
        return *route_logits(router_logits(x, router), top_k, normalise, shared=shared, pdl=pdl), None
    weights, experts = _empty_choices(rows, columns, x.device)
    stride = triton.cdiv(lines, 16) * 16
    logits = torch.empty(rows, stride, dtype=torch.float32, device=x.device)
    grouped = block_rows > 0 and local is not None and held > 0
    groups = empty_groups(rows * columns, held, block_rows, x.device) if grouped else None
    slices, choice_rows = 1 if rows == 1 else warps, warps if rows <= warps else block
    _route_kernel[grid](
        x,
        router,
        logits,
        weights,
        experts,
        turns,
        local if groups else experts,
        groups.meta if groups else experts,
        rows,
        num_experts,
        stride,
        held,
        groups.most_blocks if groups else 0,
        TOP_K=top_k,
        ROWS=block,
        CHOICE_ROWS=choice_rows,
        OUTPUTS=outputs,
        SLICES=slices,
        DEPTH=max(16, min(2048, triton.next_power_of_2(hidden)) // slices),
        HIDDEN=hidden,
        EXPERTS_POW2=triton.next_power_of_2(max(num_experts, columns)),
        NORMALISE=normalise,
        SHARED=shared,
        SHORT=x.dtype == torch.bfloat16,
        GROUPED=_grouping(rows, columns, block_rows) if grouped else "no",
        HELD_POW2=triton.next_power_of_2(max(held, 1)),
        GROUP_ROWS=max(block_rows, 1),
        PAIRS_POW2=max(16, triton.next_power_of_2(rows * columns)),
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return weights, experts, groups


def _grouping(rows: int, columns: int, block_rows: int) -> str:
    """Few pairs of rows that one program chooses for, no more of an expert than a block holds, need no counters in memory."""
    return "compared" if rows <= min(BLOCK_ROWS, block_rows) and rows * columns <= COMPARED_PAIRS else "counted"


def _empty_choices(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.empty(rows, columns, dtype=torch.float32, device=device)
    return weights, torch.empty(rows, columns, dtype=torch.int32, device=device)


@triton.jit
def _most(keys):
    """The largest key of each row of `[rows, groups, LANES]`."""
    return tl.max(tl.max(keys, 1, keep_dims=True), 2, keep_dims=True)


@triton.jit
def _choose(logits, expert, num_experts, TOP_K: tl.constexpr, LANES: tl.constexpr, NORMALISE: tl.constexpr, SHORT: tl.constexpr):
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
def _choose_rows(
    logits,
    weights,
    experts,
    row,
    live,
    expert,
    stride,
    num_experts,
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    SHARED: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Choose for `row` `[rows, 1, 1]` where it is live, and store. Reads past L1."""
    columns: tl.constexpr = TOP_K + (SHARED > 0)
    LANES: tl.constexpr = expert.shape[2]
    at = logits + row * stride
    # Told so, the compiler shares rows out to warps, not groups: a row lies in one warp, and no choice waits for another warp.
    place = tl.max_contiguous(at + expert, [2, 1, LANES])
    every = tl.load(place, mask=live & (expert < num_experts), other=0.0, cache_modifier=".cg").to(tl.float32)
    if SHARED:
        gate = tl.load(at + num_experts, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
    chosen, weight = _choose(every, expert, num_experts, TOP_K, LANES, NORMALISE, SHORT)
    column = tl.arange(0, LANES)[None, None, :]
    if SHARED:
        chosen = tl.where(column == TOP_K, (num_experts + row % SHARED).to(tl.int32), chosen)
        weight = tl.where(column == TOP_K, tl.sigmoid(gate), weight)
    here = live & (column < columns)
    tl.store(weights + row * columns + column, weight, mask=here)
    tl.store(experts + row * columns + column, chosen, mask=here)


@triton.jit
def _experts_of_lanes(EXPERTS_POW2: tl.constexpr):
    """Numbers of experts, `[1, groups, LANES]`; 4 words of each lane of a warp are read at once."""
    lanes: tl.constexpr = 128 if EXPERTS_POW2 > 128 else EXPERTS_POW2
    return tl.arange(0, EXPERTS_POW2 // lanes)[None, :, None] * lanes + tl.arange(0, lanes)[None, None, :]


@triton.jit
def _choose_kernel(
    logits,
    weights,
    experts,
    stride,
    num_experts,
    TOP_K: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    NORMALISE: tl.constexpr,
    SHARED: tl.constexpr,
    SHORT: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None, None]
    expert = _experts_of_lanes(EXPERTS_POW2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _choose_rows(logits, weights, experts, row, row >= 0, expert, stride, num_experts, TOP_K, NORMALISE, SHARED, SHORT)


@triton.jit
def _router_tile(router, line, lines, k, HIDDEN: tl.constexpr):
    return tl.load(router + line.to(tl.int64) * HIDDEN + k, mask=(line < lines) & (k < HIDDEN), other=0.0)


@triton.jit
def _one_row_logits(x, router, line, lines, HIDDEN: tl.constexpr, DEPTH: tl.constexpr, OUTPUTS: tl.constexpr, PDL: tl.constexpr):
    """Logits `[OUTPUTS]` of the only row. Weights are asked for before the kernel that makes x has ended."""
    k = tl.arange(0, DEPTH)
    w = _router_tile(router, line[:, None], lines, k[None, :], HIDDEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([OUTPUTS, DEPTH], tl.float32)
    for start in tl.static_range(0, HIDDEN, DEPTH):
        part = tl.load(x + start + k, mask=start + k < HIDDEN, other=0.0)
        total += w.to(tl.float32) * part.to(tl.float32)[None, :]
        if start + DEPTH < HIDDEN:
            w = _router_tile(router, line[:, None], lines, (start + DEPTH + k)[None, :], HIDDEN)
    return tl.sum(total, 1)


@triton.jit
def _rows_logits(
    x,
    router,
    row,
    rows,
    line,
    lines,
    HIDDEN: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Logits `[ROWS, OUTPUTS]` by matrix products: each warp has a slice of the depth, so that none waits long for its own sums."""
    k = tl.arange(0, SLICES)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
    w = _router_tile(router, line[None, :, None], lines, k, HIDDEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([SLICES, ROWS, OUTPUTS], tl.float32)
    for start in tl.static_range(0, HIDDEN, SLICES * DEPTH):
        here = (row < rows)[None, :, None] & (start + k < HIDDEN)
        part = tl.load(x + row[None, :, None] * HIDDEN + start + k, mask=here, other=0.0)
        total = tl.dot(part, tl.permute(w, (0, 2, 1)), total, input_precision="ieee")
        if start + SLICES * DEPTH < HIDDEN:
            w = _router_tile(router, line[None, :, None], lines, start + SLICES * DEPTH + k, HIDDEN)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["rows", "held", "most_blocks"])
def _route_kernel(
    x,
    router,
    logits,
    weights,
    experts,
    turns,
    local,
    meta,
    rows,
    num_experts,
    stride,
    held,
    most_blocks,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    CHOICE_ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    NORMALISE: tl.constexpr,
    SHARED: tl.constexpr,
    SHORT: tl.constexpr,
    GROUPED: tl.constexpr,
    HELD_POW2: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    columns: tl.constexpr = TOP_K + (SHARED > 0)
    lines = num_experts + (SHARED > 0)
    first = tl.program_id(1) * ROWS
    line = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    if ROWS == 1:
        total = _one_row_logits(x, router, line, lines, HIDDEN, DEPTH, OUTPUTS, PDL)
        tl.store(logits + line, total.to(x.dtype.element_ty).to(tl.float32), mask=line < lines)
    else:
        row = first + tl.arange(0, ROWS)
        total = _rows_logits(x, router, row, rows, line, lines, HIDDEN, SLICES, DEPTH, ROWS, OUTPUTS, PDL)
        to = logits + row[:, None] * stride + line[None, :]
        here = (row < rows)[:, None] & (line < lines)[None, :]
        tl.store(to, total.to(x.dtype.element_ty).to(tl.float32), mask=here)
    tl.debug_barrier()
    counter = turns + 1 + tl.program_id(1)
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counter, 0)
        each = first + tl.arange(0, CHOICE_ROWS)[:, None, None]
        live = each < rows
        expert = _experts_of_lanes(EXPERTS_POW2)
        if GROUPED == "compared":
            clear_counts(meta, held, HELD_POW2)
        _choose_rows(logits, weights, experts, each, live, expert, stride, num_experts, TOP_K, NORMALISE, SHARED, SHORT)
        if GROUPED == "compared":
            tl.debug_barrier()
            group_compared(experts, local, meta, rows * columns, held, most_blocks, PAIRS_POW2)
        if GROUPED == "counted":
            tl.debug_barrier()
            if tl.atomic_add(turns, 1, sem="acq_rel") == tl.num_programs(1) - 1:
                tl.store(turns, 0)
                group_in_program(experts, local, meta, rows * columns, held, most_blocks, PAIRS_POW2, HELD_POW2, GROUP_ROWS)
