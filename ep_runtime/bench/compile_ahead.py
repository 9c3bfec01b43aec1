"""Compilation of all candidates by several processes at once, into the compiler's cache, before anything is timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ep_runtime.bench.experts_candidates import DECODE_ROWS, GROUPED, PAIRED, PAIRED_UP_TO, block_rows
from ep_runtime.bench.experts_shapes import MODELS, Model
from kernels.experts_config import Tile
from kernels.experts_grouped import down_grouped, gate_up_grouped
from kernels.experts_paired import down_paired, gate_up_paired
from kernels.experts_persistent import down_persistent, gate_up_persistent
from kernels.grouping import group_pairs
from kernels.router_triton import COUNTERS, route_rows

HIDDEN = 2048


def compile_share(share: tuple[int, int]) -> str:
    """Run every `of`-th candidate from `at` once, on a tiny problem of the real widths. share: (at, of). Says what failed."""
    at, of = share
    failed = []
    for label, job in _jobs()[at::of]:
        try:
            job()
        except Exception as error:  # the timing run meets it again, and records it
            failed.append(f"{label}: {repr(error)[:300]}")
    torch.cuda.synchronize()
    return "\n".join(failed)


def _jobs() -> list[tuple[str, Callable[[], object]]]:
    jobs: list[tuple[str, Callable[[], object]]] = []
    for tile in PAIRED["gate_up"]:
        jobs.append((f"paired gate_up {tile}", partial(_paired, "gate_up", tile, 768, 8, True)))
    for tile in PAIRED["down"]:
        for units, top_k in ((768, 8), (512, 8), (512, 10)):
            jobs.append((f"paired down {tile}", partial(_paired, "down", tile, units, top_k, True)))
    for pdl in (False, True):
        for block_m, kinds in GROUPED.items():
            for kind, tiles in kinds.items():
                for tile in tiles:
                    jobs.append((f"grouped {kind} {tile}", partial(_grouped, kind, tile, block_m, 768, pdl)))
    for model in MODELS.values():
        for rows in DECODE_ROWS:
            blocks = [0] * (rows <= PAIRED_UP_TO) + block_rows(rows, model.top_k, model.experts)
            jobs += [(f"router {model} {rows} {block}", partial(_route, model, rows, block)) for block in blocks]
    return jobs


def _route(model: Model, rows: int, block: int) -> None:
    x = torch.zeros(rows, model.hidden, dtype=torch.bfloat16, device="cuda")
    router = torch.zeros(model.experts, model.hidden, dtype=torch.bfloat16, device="cuda")
    turns, local = torch.zeros(COUNTERS, dtype=torch.int32, device="cuda"), torch.arange(model.experts, device="cuda") % model.held
    route_rows(x, router, model.top_k, True, turns, local, model.held, block, pdl=True)


def _weights(kind: str, units: int) -> torch.Tensor:
    shape = (2, 2 * units, HIDDEN) if kind == "gate_up" else (2, HIDDEN, units)
    return torch.zeros(shape, dtype=torch.bfloat16, device="cuda")


def _choices(top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    experts = torch.zeros(2, top_k, dtype=torch.int32, device="cuda")
    return experts, torch.ones(2, top_k, device="cuda"), torch.arange(2, device="cuda")


def _paired(kind: str, tile: Tile, units: int, top_k: int, pdl: bool) -> None:
    experts, weights, local = _choices(top_k)
    x = torch.zeros(2, HIDDEN, dtype=torch.bfloat16, device="cuda")
    if kind == "gate_up":
        gate_up_paired(x, experts, local, _weights(kind, units), tile, pdl=pdl)
    else:
        active = torch.zeros(2 * top_k, units, device="cuda")
        down_paired(active, experts, weights, local, _weights(kind, units), torch.empty_like(x), tile, pdl=pdl)


def _grouped(kind: str, tile: Tile, block_m: int, units: int, pdl: bool) -> None:
    experts, weights, local = _choices(8)
    groups = group_pairs(experts, local, 2, block_m)
    if kind == "gate_up":
        x = torch.zeros(2, HIDDEN, dtype=torch.bfloat16, device="cuda")
        (gate_up_persistent if tile.persistent else gate_up_grouped)(x, _weights(kind, units), groups, 8, tile, pdl=pdl)
    else:
        active = torch.zeros(16, units, dtype=torch.bfloat16, device="cuda")
        (down_persistent if tile.persistent else down_grouped)(active, weights, _weights(kind, units), groups, tile, pdl=pdl)
