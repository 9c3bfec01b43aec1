"""Expert choice on the GPU: softmax and the k largest of each row, in steps of decoding with the product that makes the logits.

Shape letters: T rows, H hidden, E experts of the model, k choices a row. Ties go to the lower expert. All ranks get the same bits.

A shared expert that `shared` ranks hold is one more choice of every row: its gate is one more row of the router (row E), and rank
`t % shared` runs it for row t. The outputs have `k + 1` columns then; the last one holds expert `E + t % shared`, and the sigmoid
of the gate's logit. It takes no part in the choice, nor in the softmax.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from kernels.choice_triton import choose_rows, experts_of_lanes, pairs_of, store_choices
from kernels.grouping import Groups, empty_groups
from kernels.grouping_few import (
    COMPARED_PLACES,
    MOST_PLACES,
    clear_counts,
    count_pairs,
    group_compared,
    held_choices,
    held_places,
    place_counted,
)
from kernels.launch import Launch, bind, cdiv, next_power_of_2

FUSED_ROWS = 256
"""Up to this many rows one launch, or two, make logits, choice and groups."""

BLOCK_ROWS = 16
"""Most rows of one launch. As many are the least that a matrix product takes."""

OUTPUTS = 8
"""Logits that a program of that launch makes of each row, where there is more than one."""

CHOICE_ROWS = 4
"""Rows that a program of the second of two launches chooses for."""

COUNTS = tl.constexpr(16)
"""Where the counters of experts begin in `turns`."""

MOST_HELD = 1024
"""Up to this many experts held here groups are made with the choice."""

COUNTERS = 16 + MOST_HELD
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
        launch = _choosing(top_k, num_experts, normalise, shared, logits.dtype, pdl)
        nothing = (experts, experts, experts)
        launch((rows, 1, 1), logits, weights, experts, *nothing, logits.stride(0), rows, num_experts, 0, 0)
    return weights, experts


def router_logits(x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x [T, H] @ router [E, H]^T + bias`, `[T, E]` by the library, rows beginning at multiples of 16 elements.

    A shared expert's gate makes E odd: the library takes nine times as long then, a copy of the weight with rows to spare pays.
    """
    lines, hidden = router.shape
    whole = cdiv(lines, 16) * 16
    if whole > lines:
        spare = router.new_empty(whole, hidden)
        spare[:lines] = router
        router = spare
    logits = functional.linear(x, router)[:, :lines]
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

    With `block_rows` the pairs are grouped, too, as by `group_pairs` with `local` and `held` (up to MOST_HELD). `turns` [COUNTERS]
    int32 is zero before and after: programs count themselves and pairs in it. Launches that share it must not overlap but for the
    part of a dependent one before its wait. With `shared` the router is `[E + 1, H]`.
    """
    rows = x.shape[0]
    if not 1 <= rows <= FUSED_ROWS:
        raise ValueError(f"{rows} rows; the router's product is fused for 1 to {FUSED_ROWS}")
    if not (x.is_contiguous() and router.is_contiguous()):
        raise ValueError("x and the router's weight must be contiguous")
    columns, num_experts = top_k + (shared > 0), router.shape[0] - (shared > 0)
    weights, experts = _empty_choices(rows, columns, x.device)
    groups = None
    if block_rows > 0 and local is not None and 0 < held <= MOST_HELD:
        groups = empty_groups(rows * columns, held, block_rows, x.device)
    out = (weights, experts, turns, local if groups else experts, groups.meta if groups else experts)
    sizes = (num_experts, held, groups.most_blocks if groups else 0)
    options = _choice(top_k, num_experts, normalise, shared, x.dtype)
    places = _chosen_at_once(rows) * next_power_of_2(columns)
    if rows <= BLOCK_ROWS and (groups is None or _compared(rows, places, block_rows)):
        _one_launch(x, router, out, sizes, options | _grouping(groups, places), pdl)
    else:
        _two_launches(x, router, out, sizes, options | _grouping(groups, next_power_of_2(rows * columns)), pdl)
    return weights, experts, groups


def _one_launch(x: torch.Tensor, router: torch.Tensor, out: Any, sizes: Any, options: dict[str, Any], pdl: bool) -> None:
    (rows, hidden), lines = x.shape, router.shape[0]
    block, warps, outputs = (1, 4, 4) if rows == 1 else (BLOCK_ROWS, 8, OUTPUTS)
    stride = cdiv(lines, 16) * 16
    slices = 1 if rows == 1 else warps
    _route_kernel[(cdiv(lines, outputs),)](
        x,
        router,
        torch.empty(rows, stride, dtype=torch.float32, device=x.device),
        *out,
        stride,
        rows,
        *sizes,
        ROWS=block,
        CHOICE_ROWS=_chosen_at_once(rows),
        OUTPUTS=outputs,
        SLICES=slices,
        DEPTH=max(16, min(2048, next_power_of_2(hidden)) // slices),
        HIDDEN=hidden,
        **options,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


def _two_launches(x: torch.Tensor, router: torch.Tensor, out: Any, sizes: Any, options: dict[str, Any], pdl: bool) -> None:
    """Sums of shares of the depth first, so that there are programs enough; they are added where rows choose."""
    (rows, hidden), lines = x.shape, router.shape[0]
    block, outputs, depth, warps = share_tile(rows, x.element_size())
    depth = max(16, min(depth, next_power_of_2(hidden)))
    parts, stride = cdiv(hidden, depth), cdiv(lines, 16) * 16
    logits = torch.empty(parts, rows, stride, dtype=torch.float32, device=x.device)
    _share_kernel[(cdiv(lines, outputs), cdiv(rows, block), parts)](
        x,
        router,
        logits,
        stride,
        rows,
        lines,
        HIDDEN=hidden,
        ROWS=block,
        OUTPUTS=outputs,
        DEPTH=depth,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    _choose_kernel[(cdiv(rows, CHOICE_ROWS),)](
        logits,
        *out,
        stride,
        rows,
        *sizes,
        ROWS=CHOICE_ROWS,
        PARTS=parts,
        **options,
        PDL=pdl,
        num_warps=CHOICE_ROWS,
        launch_pdl=pdl,
    )


def share_tile(rows: int, element: int) -> tuple[int, int, int, int]:
    """Rows, outputs, depth and warps of a program that makes sums of a share of the depth; its elements have `element` bytes.

    What it multiplies lies in shared memory, so the depth is given in bytes.
    """
    block, outputs, depth, warps = (16, 64, 512, 4) if rows <= 32 else (64, 64, 1024, 8)
    return block, outputs, depth // element, warps


@cache
def _choosing(top_k: int, num_experts: int, normalise: bool, shared: int, dtype: torch.dtype, pdl: bool) -> Launch:
    """Of rows whose logits are there; nothing is grouped."""
    options = _choice(top_k, num_experts, normalise, shared, dtype) | _grouping(None, 0)
    return bind(_choose_kernel, ROWS=1, PARTS=1, **options, PDL=pdl, num_warps=1, launch_pdl=pdl)


def _choice(top_k: int, num_experts: int, normalise: bool, shared: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "TOP_K": top_k,
        "DTYPE": getattr(tl, str(dtype).removeprefix("torch.")),
        "EXPERTS_POW2": next_power_of_2(max(num_experts, top_k + (shared > 0))),
        "NORMALISE": normalise,
        "SHARED": shared,
    }


def _grouping(groups: Groups | None, places: int) -> dict[str, Any]:
    """GROUPED is the rows of a block of the groups, or 0; there are at most `places` pairs."""
    if groups is None:
        return {"GROUPED": 0, "HELD_POW2": 1, "PAIRS_POW2": 1}
    return {"GROUPED": groups.block_rows, "HELD_POW2": next_power_of_2(groups.held), "PAIRS_POW2": max(16, places)}


def _chosen_at_once(rows: int) -> int:
    """Rows of the tile in which one launch chooses: a warp's each, or two."""
    return 4 if rows == 1 else 8 if rows <= 8 else BLOCK_ROWS


def _compared(rows: int, places: int, block_rows: int) -> bool:
    """Whether pairs are so few that one program compares all of them, and no expert has more of them than a block holds."""
    return rows <= block_rows and places <= (COMPARED_PLACES if rows > 1 else MOST_PLACES)


def _empty_choices(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.empty(rows, columns, dtype=torch.float32, device=device)
    return weights, torch.empty(rows, columns, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["rows", "held", "most_blocks"])
def _choose_kernel(
    logits,
    weights,
    experts,
    turns,
    local,
    meta,
    stride,
    rows,
    num_experts,
    held,
    most_blocks,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    NORMALISE: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPED: tl.constexpr,
    HELD_POW2: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows of logits `[PARTS, rows, stride]`, a warp's each; the last program groups."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    expert = experts_of_lanes(EXPERTS_POW2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chosen, weight = choose_rows(
        logits, rows * stride, row, row < rows, expert, stride, num_experts, TOP_K, PARTS, DTYPE, NORMALISE, SHARED
    )
    columns: tl.constexpr = TOP_K + (SHARED > 0)
    pair, here = pairs_of(row, expert.shape[2], columns)
    here = here & (row < rows)
    if GROUPED:
        # Indices are asked for before choices are stored, which takes the time that they need to arrive.
        mine = held_choices(chosen, local, here)
        store_choices(weights, experts, chosen, weight, pair, here)
        count_pairs(turns + COUNTS, meta, mine, pair, here, rows * columns, held, most_blocks)
        tl.debug_barrier()
        if tl.atomic_add(turns, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            tl.store(turns, 0)
            place_counted(turns + COUNTS, meta, rows * columns, held, most_blocks, PAIRS_POW2, HELD_POW2, GROUPED)
    else:
        store_choices(weights, experts, chosen, weight, pair, here)


@triton.jit(do_not_specialize=["rows"])
def _share_kernel(
    x,
    router,
    logits,
    stride,
    rows,
    lines,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums of one share of the depth, `[shares, rows, stride]`. Weights are asked for before the kernel that makes x has ended."""
    line, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(2) * DEPTH + tl.arange(0, DEPTH)
    # Lines past the last read the last one again, and are not stored.
    at = router + tl.minimum(line, lines - 1).to(tl.int64)[:, None] * HIDDEN + k[None, :]
    here = (row < rows)[:, None]
    if HIDDEN % DEPTH == 0:
        w = tl.load(at)
    else:
        w = tl.load(at, mask=(k < HIDDEN)[None, :], other=0.0)
        here = here & (k < HIDDEN)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.load(x + row[:, None] * HIDDEN + k[None, :], mask=here, other=0.0)
    if ROWS < 64:
        # 64 outputs by 32 rows make the widest matrix instruction, 32 rows by 64 outputs do not.
        total = tl.dot(w, part.T, input_precision="ieee").T
    else:
        total = tl.dot(part, w.T, input_precision="ieee")
    to = logits + (tl.program_id(2) * rows + row)[:, None] * stride + line[None, :]
    tl.store(to, total, mask=(row < rows)[:, None] & (line < stride)[None, :])


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
    stride,
    rows,
    num_experts,
    held,
    most_blocks,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    CHOICE_ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    NORMALISE: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPED: tl.constexpr,
    HELD_POW2: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    """OUTPUTS logits of all rows; the last program chooses and groups."""
    lines = num_experts + (SHARED > 0)
    line = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    if ROWS == 1:
        total = _one_row_logits(x, router, line, lines, HIDDEN, DEPTH, OUTPUTS, PDL)
        tl.store(logits + line, total, mask=line < lines)
    else:
        row = tl.arange(0, ROWS)
        total = _rows_logits(x, router, row, rows, line, lines, HIDDEN, SLICES, DEPTH, ROWS, OUTPUTS, PDL)
        to = logits + row[:, None] * stride + line[None, :]
        tl.store(to, total, mask=(row < rows)[:, None] & (line < lines)[None, :])
    tl.debug_barrier()
    if tl.atomic_add(turns, 1, sem="acq_rel") != tl.num_programs(0) - 1:
        return
    tl.store(turns, 0)
    row = tl.arange(0, CHOICE_ROWS)[:, None, None]
    expert = experts_of_lanes(EXPERTS_POW2)
    if GROUPED:
        clear_counts(meta, held, HELD_POW2)
    chosen, weight = choose_rows(logits, 0, row, row < rows, expert, stride, num_experts, TOP_K, 1, DTYPE, NORMALISE, SHARED)
    columns: tl.constexpr = TOP_K + (SHARED > 0)
    pair, here = pairs_of(row, expert.shape[2], columns)
    here = here & (row < rows)
    if GROUPED:
        mine = held_places(chosen, local, rows, columns, PAIRS_POW2)
        store_choices(weights, experts, chosen, weight, pair, here)
        tl.debug_barrier()
        group_compared(mine, meta, held, most_blocks, columns, CHOICE_ROWS)
    else:
        store_choices(weights, experts, chosen, weight, pair, here)
