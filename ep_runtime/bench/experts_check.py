"""Expert kernels and the router on a GPU against float64, on random data of many shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from kernels.experts_config import ExpertsConfig, Tile, default_config
from kernels.experts_triton import moe_experts
from kernels.grouping import Groups
from kernels.router_triton import COUNTERS, FUSED_ROWS, route_logits, route_rows


def local_experts(experts: int, held: int) -> torch.Tensor:
    """An expert's index on a rank that holds the first `held`, or -1."""
    local = torch.full((experts,), -1, dtype=torch.int64, device="cuda")
    local[:held] = torch.arange(held, device="cuda")
    return local


def random_weights(held: int, hidden: int, units: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and down, scaled so that outputs stay near 1."""
    gate_up = torch.empty(held, 2 * units, hidden, device="cuda", dtype=dtype).normal_(std=hidden**-0.5)
    return gate_up, torch.empty(held, hidden, units, device="cuda", dtype=dtype).normal_(std=units**-0.5)


def exact(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, local: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The sum in float64, expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    mine = local[experts.long()]
    for expert in range(gate_up.shape[0]):
        row, choice = (mine == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x[row].double(), gate_up[expert].double()).chunk(2, -1)
        product = functional.linear(functional.silu(gate) * up, down[expert].double())
        out.index_add_(0, row, product * weights[row, choice].double().unsqueeze(-1))
    return out


def error_of(out: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in the Euclidean norm; NaN where the output has one."""
    return float((out.double() - want).norm() / want.norm().clamp(min=1e-30))


SHAPES = (
    (1, 20, 20, 3, 256, 96),
    (2, 128, 64, 8, 2048, 768),
    (7, 60, 15, 4, 200, 72),
    (33, 64, 16, 8, 2048, 512),
    (65, 10, 3, 1, 72, 24),
    (130, 512, 512, 10, 2048, 512),
    (600, 16, 16, 4, 512, 256),
    (3000, 32, 8, 8, 1024, 768),
)
"""Rows, experts, experts held, choices, hidden, units."""


def check_shape(shape: tuple[int, int, int, int, int, int]) -> list[dict[str, Any]]:
    """Every form and flag of the expert kernels on random data of one of SHAPES; one row for each, with its error."""
    rows, num_experts, held, top_k, hidden, units = shape
    torch.manual_seed(1)
    local = local_experts(num_experts, held)
    gate_up, down = random_weights(held, hidden, units, torch.bfloat16)
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    weights, experts = route_logits(torch.randn(rows, num_experts, device="cuda"), top_k, True)
    want = exact(x, experts, weights, local, gate_up, down)
    results = []
    for label, config in _checked_configs(rows, top_k, held, hidden, units):
        row: dict[str, Any] = {"what": label, "shape": shape}
        try:
            poison(x)
            first = moe_experts(x, experts, weights, local, gate_up, down, config=config)
            poison(x)
            again = moe_experts(x, experts, weights, local, gate_up, down, config=config)
            torch.cuda.synchronize()
            row |= {"error": error_of(first, want), "same_bits": bool(torch.equal(first, again))}
        except Exception as error:  # one variant must not end the run
            row["failed"] = repr(error)[:500]
        results.append(row | {"good": row.get("error", 1.0) < 1e-2 and row.get("same_bits", False)})
    return results


def poison(x: torch.Tensor) -> None:
    """Leave NaN in the memory that the next allocations get, so that an element that is not written shows."""
    for numel in (1 << 12, 1 << 16, 1 << 20, 1 << 22, x.numel(), 1 << 24):
        torch.full((numel,), float("nan"), device=x.device)


def _checked_configs(rows: int, top_k: int, held: int, hidden: int, units: int) -> Iterator[tuple[str, ExpertsConfig]]:
    yield "default", default_config(rows, top_k, held)
    small = Tile(block_n=16, block_k=64, stages=2)
    yield "paired", ExpertsConfig(form="paired", gate_up=small, down=small)
    yield "paired pdl", ExpertsConfig(form="paired", gate_up=small, down=small, pdl=True)
    for block_m in (16, 64, 128):
        for swap in (False, True):
            for descriptors in (False, True):
                if descriptors and (hidden * 2 % 16 or units * 2 % 16):
                    continue
                tile = Tile(block_m=block_m, block_n=64, block_k=64, swap=swap, descriptors=descriptors)
                label = f"grouped m{block_m}{' swap' * swap}{' descriptors' * descriptors}"
                yield label, ExpertsConfig(form="grouped", gate_up=tile, down=tile, pdl=descriptors)
    for block_m, programs in ((64, 2), (128, 1)):
        if hidden * 2 % 16 == 0 and units * 2 % 16 == 0:
            tile = Tile(block_m=block_m, block_n=64, block_k=64, persistent=programs)
            wide = Tile(block_m=block_m, block_n=128, block_k=64, warps=8, persistent=programs)
            yield f"persistent m{block_m}", ExpertsConfig(form="grouped", gate_up=tile, down=wide, pdl=programs == 1)


class Router(NamedTuple):
    """One problem of `check_router`; `shared` as in `kernels.router_triton`, `block_rows` of the groups made with the choice."""

    rows: int
    experts: int
    top_k: int
    normalise: bool
    shared: int = 0
    block_rows: int = 16
    dtype: torch.dtype = torch.bfloat16
    hidden: int = 2048


ROUTERS = (
    Router(1, 128, 8, True),
    Router(5, 60, 4, False, 3),
    Router(16, 512, 10, True, 2),
    Router(300, 256, 8, True, 2),
    Router(1, 256, 8, True, 2, hidden=2100),
    Router(100, 512, 10, True, 4),
    Router(33, 128, 8, True, 2, 32, torch.float32),
    Router(9, 40, 3, True, 0, 16, torch.float16, 72),
    Router(40, 256, 8, True, 2, hidden=2100),
    Router(256, 512, 10, True, 2, 64),
)


def check_router(router: Router) -> list[dict[str, Any]]:
    """The router's kernels on random data of one of ROUTERS, as `check_shape`."""
    row: dict[str, Any] = {"what": "router", "shape": router, "good": False}
    try:
        x = torch.randn(router.rows, router.hidden, device="cuda", dtype=router.dtype)
        lines = router.experts + (router.shared > 0)
        weight = torch.randn(lines, router.hidden, device="cuda").mul(router.hidden**-0.5).to(router.dtype)
        logits = functional.linear(x, weight)
        row |= _router_errors(*route_logits(logits, router.top_k, router.normalise, shared=router.shared), logits, router)
        if router.rows <= FUSED_ROWS:
            row |= _check_fused(x, weight, router, row["good"])
    except Exception as error:  # one variant must not end the run
        row |= {"good": False, "failed": repr(error)[:500]}
    return [row]


def _check_fused(x: torch.Tensor, weight: torch.Tensor, router: Router, good: bool) -> dict[str, Any]:
    """Three launches in a row, of which the last one's results are compared."""
    turns = torch.zeros(COUNTERS, dtype=torch.int32, device="cuda")
    local = torch.full((router.experts + router.shared,), -1, device="cuda")
    local[::2] = torch.arange(len(local[::2]), device="cuda").flip(0)
    held = len(local[::2])
    for _ in range(3):
        weights, experts, groups = route_rows(
            x, weight, router.top_k, router.normalise, turns, local, held, router.block_rows, shared=router.shared
        )
    logits = functional.linear(x.double(), weight.double()).to(router.dtype)
    found = _router_errors(weights, experts, logits, router)
    wrong = wrong_groups(groups, experts, local) if groups else ""
    # A logit may be rounded the other way than the exact one.
    good = good and found["error"] < 5e-2 and not turns.any() and not wrong
    return {"good": good, "fused_error": found["error"], "wrong_groups": wrong}


def wrong_groups(groups: Groups, experts: torch.Tensor, local: torch.Tensor) -> str:
    """What is wrong with groups of these pairs, empty if nothing: each held pair is in one block of its expert, no other is."""
    mine, meta, held, bound = local[experts.long()].flatten().cpu(), groups.meta.cpu(), groups.held, groups.most_blocks
    number = int(meta[0])
    blocks = meta[1 + 2 * held :][: 3 * bound].view(3, bound)[:, :number].T.tolist()
    listed = meta[1 + 2 * held + 3 * bound :]
    owned = [(owner, pair) for owner, start, rows in blocks for pair in listed[start : start + rows].tolist()]
    want = [(owner, pair) for pair, owner in enumerate(mine.tolist()) if owner >= 0]
    counts = torch.bincount(mine[mine >= 0], minlength=held)
    if number != int((-(-counts // groups.block_rows)).sum()):
        return f"{number} blocks"
    return "" if sorted(owned) == sorted(want) else "pairs are not in their blocks"


def _router_errors(weights: torch.Tensor, experts: torch.Tensor, logits: torch.Tensor, router: Router) -> dict[str, Any]:
    """Chosen logits against torch's (ties leave the experts open), and weights against softmax in float64."""
    top_k, plain = router.top_k, logits[:, : router.experts]
    want = plain.float().topk(top_k).values
    chosen = plain.float().gather(1, experts[:, :top_k].long())
    every = plain.double().softmax(-1).gather(1, experts[:, :top_k].long())
    exact_weights = every / every.sum(-1, keepdim=True) if router.normalise else every
    distinct = all(len(set(row)) == top_k for row in experts.tolist())
    if router.shared:
        exact_weights = torch.cat((exact_weights, logits[:, -1:].double().sigmoid()), 1)
        owner = router.experts + torch.arange(len(experts), device=experts.device) % router.shared
        distinct = all(len(set(row)) == top_k + 1 for row in experts.tolist()) and bool(torch.equal(experts[:, -1].long(), owner))
    off, error = float((chosen - want).abs().max()), error_of(weights, exact_weights)
    return {"chosen_off": off, "error": error, "good": off == 0.0 and error < 1e-5 and distinct}
