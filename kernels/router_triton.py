"""Expert choice on the GPU: softmax and the k largest of each row in one kernel, for few rows with the router's product in it.

Shape letters: T rows, H hidden, E experts of the model, k choices a row. Ties go to the lower expert. All ranks get the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.grouping import Groups, empty_groups, group_in_program

FUSED_ROWS = 8
"""Up to this many rows the router's product runs in the same kernel as the choice."""

EXPERTS_A_PROGRAM = 4


def route_logits(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights `[T, k]` float32 and experts `[T, k]` int32, largest first, of logits `[T, E]`; softmax in float32.

    Normalised weights sum to 1: that is the softmax of the chosen logits alone.
    """
    rows, num_experts = logits.shape
    weights, experts = _empty_choices(rows, top_k, logits.device)
    if rows:
        _choose_kernel[(rows,)](
            logits,
            weights,
            experts,
            logits.stride(0),
            num_experts,
            TOP_K=top_k,
            TOP_K_POW2=triton.next_power_of_2(top_k),
            EXPERTS_POW2=triton.next_power_of_2(num_experts),
            NORMALISE=normalise,
            num_warps=1,
        )
    return weights, experts


def route_rows(
    x: torch.Tensor,
    router: torch.Tensor,
    top_k: int,
    normalise: bool,
    turn: torch.Tensor,
    local: torch.Tensor | None = None,
    held: int = 0,
    block_rows: int = 0,
    *,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, Groups | None]:
    """`route_logits` of `x [T, H] @ router [E, H]^T`, for T up to FUSED_ROWS, in one kernel; logits are rounded to x's dtype.

    `turn` [1] int32 is zero before and after: programs count themselves in it, and the last one chooses. Launches that share it
    must not overlap. With `block_rows` the pairs are grouped, too, as by `group_pairs` with `local` and `held`.
    """
    rows, hidden = x.shape
    num_experts = router.shape[0]
    if not 1 <= rows <= FUSED_ROWS:
        raise ValueError(f"{rows} rows; the router's product is fused for 1 to {FUSED_ROWS}")
    if not (x.is_contiguous() and router.is_contiguous()):
        raise ValueError("x and the router's weight must be contiguous")
    weights, experts = _empty_choices(rows, top_k, x.device)
    logits = torch.empty(rows, num_experts, dtype=x.dtype, device=x.device)
    grouped = block_rows > 0 and local is not None and held > 0
    groups = empty_groups(rows * top_k, held, block_rows, x.device) if grouped else None
    _route_kernel[(triton.cdiv(num_experts, EXPERTS_A_PROGRAM),)](
        x,
        router,
        logits,
        weights,
        experts,
        turn,
        local if groups else experts,
        groups.meta if groups else experts,
        rows,
        num_experts,
        hidden,
        held,
        groups.most_blocks if groups else 0,
        TOP_K=top_k,
        TOP_K_POW2=triton.next_power_of_2(top_k),
        ROWS_POW2=triton.next_power_of_2(rows),
        EXPERTS_POW2=triton.next_power_of_2(num_experts),
        EXPERTS_BLOCK=EXPERTS_A_PROGRAM,
        HIDDEN_BLOCK=min(2048, triton.next_power_of_2(hidden)),
        NORMALISE=normalise,
        GROUPED=grouped,
        HELD_POW2=triton.next_power_of_2(max(held, 1)),
        BLOCK_ROWS=max(block_rows, 1),
        PAIRS_POW2=max(16, triton.next_power_of_2(rows * top_k)),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return weights, experts, groups


def _empty_choices(rows: int, top_k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=device)
    return weights, torch.empty(rows, top_k, dtype=torch.int32, device=device)


@triton.jit
def _choose(
    logits, expert, num_experts, TOP_K: tl.constexpr, TOP_K_POW2: tl.constexpr, ROWS: tl.constexpr, NORMALISE: tl.constexpr
):
    """Weights and experts `[ROWS, TOP_K_POW2]` of float32 logits `[ROWS, E padded]`; `expert` [E padded] counts from 0.

    A key holds the logit's bits, in an order that integers share with floats, above the complement of the expert: all keys differ,
    so even rows with NaN give k different experts that exist, and equal logits go to the lower one.
    """
    logits = tl.where(logits == 0, 0.0, logits)  # -0.0 ties with 0.0
    bits = logits.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    lowest: tl.constexpr = -0x8000000000000000
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - expert).to(tl.int64)[None, :]
    key = tl.where((expert < num_experts)[None, :], key, lowest)
    column = tl.arange(0, TOP_K_POW2)
    chosen = tl.full([ROWS, TOP_K_POW2], lowest, tl.int64)
    for choice in tl.static_range(TOP_K):
        best = tl.max(key, 1)
        chosen = tl.where((column == choice)[None, :], best[:, None], chosen)
        key = tl.where(key == best[:, None], lowest, key)
    back = (chosen >> 32).to(tl.int32)
    value = (back ^ ((back >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    value = tl.where((column < TOP_K)[None, :], value, float("-inf"))
    top = tl.max(value, 1)
    raised = tl.exp(value - top[:, None])
    if NORMALISE:
        total = tl.sum(raised, 1)
    else:
        every = tl.where((expert < num_experts)[None, :], logits, float("-inf"))
        total = tl.sum(tl.exp(every - top[:, None]), 1)
    return raised / total[:, None], 0x7FFFFFFF - (chosen & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _choose_kernel(
    logits,
    weights,
    experts,
    stride,
    num_experts,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_POW2)
    mine = tl.load(logits + row * stride + expert, mask=expert < num_experts, other=0.0).to(tl.float32)
    weight, chosen = _choose(mine[None, :], expert, num_experts, TOP_K, TOP_K_POW2, 1, NORMALISE)
    column = tl.arange(0, TOP_K_POW2)[None, :]
    tl.store(weights + row * TOP_K + column, weight, mask=column < TOP_K)
    tl.store(experts + row * TOP_K + column, chosen, mask=column < TOP_K)


@triton.jit(do_not_specialize=["rows", "held", "most_blocks"])
def _route_kernel(
    x,
    router,
    logits,
    weights,
    experts,
    turn,
    local,
    meta,
    rows,
    num_experts,
    hidden,
    held,
    most_blocks,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    ROWS_POW2: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    HIDDEN_BLOCK: tl.constexpr,
    NORMALISE: tl.constexpr,
    GROUPED: tl.constexpr,
    HELD_POW2: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    mine = tl.program_id(0) * EXPERTS_BLOCK + tl.arange(0, EXPERTS_BLOCK)
    at = tl.arange(0, HIDDEN_BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for row in range(rows):
        total = tl.zeros([EXPERTS_BLOCK], tl.float32)
        for start in range(0, hidden, HIDDEN_BLOCK):
            k = start + at
            part = tl.load(x + row * hidden + k, mask=k < hidden, other=0.0).to(tl.float32)
            w = tl.load(
                router + mine[:, None] * hidden + k[None, :], mask=(mine < num_experts)[:, None] & (k < hidden)[None, :], other=0.0
            )
            total += tl.sum(w.to(tl.float32) * part[None, :], 1)
        tl.store(logits + row * num_experts + mine, total.to(logits.dtype.element_ty), mask=mine < num_experts)
    tl.debug_barrier()
    if tl.atomic_add(turn, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(turn, 0)
        each = tl.arange(0, ROWS_POW2)[:, None]
        expert = tl.arange(0, EXPERTS_POW2)
        live = (each < rows) & (expert < num_experts)[None, :]
        every = tl.load(logits + each * num_experts + expert[None, :], mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
        weight, chosen = _choose(every, expert, num_experts, TOP_K, TOP_K_POW2, ROWS_POW2, NORMALISE)
        column = tl.arange(0, TOP_K_POW2)[None, :]
        here = (each < rows) & (column < TOP_K)
        tl.store(weights + each * TOP_K + column, weight, mask=here)
        tl.store(experts + each * TOP_K + column, chosen, mask=here)
        if GROUPED:
            tl.debug_barrier()
            group_in_program(experts, local, meta, rows * TOP_K, held, most_blocks, PAIRS_POW2, HELD_POW2, BLOCK_ROWS)
