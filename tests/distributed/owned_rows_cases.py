"""What ranks run in the tests of rows that stay with their owners: kernels in the interpreter, over files that the ranks map."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from tests.distributed.comm_cases import exchange_of, part
from tests.distributed.one_shot_cases import _memory, _pairs
from tests.support.rank_context import RankContext

EPS = 1e-3


def owners_of(call: int, rows: int, world: int) -> torch.Tensor:
    """Mixed; every third call all rows are of one rank, which changes, so that the others have none."""
    row = torch.arange(rows)
    return torch.full_like(row, call // 3 % world) if call % 3 == 2 else (row * 5 + call) // 2 % world


def added(call: int, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What every rank has of a call besides its partial: residual, shared expert's output and gate, the norm's weight."""
    draw = torch.Generator().manual_seed(call + 5000)
    rows, width = shape
    sizes = {"x": (rows, width), "shared": (rows, width), "gate": (rows, 1), "weight": (width,)}
    return {name: torch.randn(size, generator=draw).to(dtype) for name, size in sizes.items()}


LEFT = 7.5
"""In the residual's rows of other ranks, which nobody may write."""


def _own(tensor: torch.Tensor, owners: torch.Tensor, rank: int, elsewhere: float = float("nan")) -> torch.Tensor:
    """With `elsewhere` in rows of other ranks."""
    return tensor.masked_fill((owners != rank)[:, None], elsewhere)


def move_rows(
    ctx: RankContext, *, dtype: str, shapes: list[list[int]], programs: int, word_rows: int, two_shots: bool
) -> list[dict[str, np.ndarray]]:
    """For each shape, one call after another, in float32: what scatters and gathers leave, and sums."""
    from kernels.peer_rows import gather_add_norm_rows, gather_owned_rows, scatter_add_norm_rows
    from kernels.peer_sums import reduce_add_norm_rows

    of = getattr(torch, dtype)
    memory, _held = _memory(ctx, exchange_of(ctx), "rows", of, programs, 32, "thread", word_rows, two_shots)
    found = []
    for call, (rows, width) in enumerate(shapes):
        owners = owners_of(call, rows, ctx.world)
        more = added(call, (rows, width), of)
        shared = {"shared": more["shared"], "shared_gate": more["gate"]}
        partial = part(ctx.rank, call, (rows, width), of)
        pairs = _pairs(ctx, call, (rows, width), of)
        x, chosen, whole = (_own(more["x"], owners, ctx.rank, LEFT) for _ in range(3))
        x_of_sum, both = more["x"].clone(), more["x"].clone()
        results: dict[str, Any] = {
            "normed": scatter_add_norm_rows(memory, partial, owners, x, more["weight"], EPS, **shared),
            "normed of choices": scatter_add_norm_rows(memory, pairs, owners, chosen, more["weight"], EPS, zero_centered=True),
            "gathered": gather_add_norm_rows(memory, _own(partial, owners, ctx.rank), owners, whole, more["weight"], EPS),
            "normed of the sum": reduce_add_norm_rows(memory, partial, x_of_sum, more["weight"], EPS, **shared),
            "normed of choices of the sum": reduce_add_norm_rows(memory, pairs, both, more["weight"], EPS, zero_centered=True),
        }
        shown = results["normed"].clone()
        gather_owned_rows(memory, shown, owners)
        results |= {"shown": shown, "x": x, "x of choices": chosen, "x of the gather": whole, "x of the sum": x_of_sum}
        found.append({name: result.float().numpy() for name, result in results.items()} | {"partial": partial.float().numpy()})
    return found


def gather_alone(ctx: RankContext, *, rows: int, word_rows: int, kind: str) -> bool:
    """Rank 0 moves rows with peers that never come, until its host says to stop; whether it was waiting until then."""
    from kernels.peer_rows import gather_owned_rows, scatter_add_norm_rows

    memory, _held = _memory(ctx, exchange_of(ctx), "rows", torch.float32, 4, 32, "thread", word_rows)
    if ctx.rank != 0:
        return True
    done = threading.Event()
    owners = torch.full((rows,), 0 if kind == "owner" else 1)

    def move() -> None:
        mine = torch.ones(rows, 8)
        if kind == "scatter":
            scatter_add_norm_rows(memory, mine, owners, mine.clone(), torch.ones(8), EPS)
        else:
            gather_owned_rows(memory, mine, owners)
        done.set()

    threading.Thread(target=move, daemon=True).start()
    waited = not done.wait(0.3)
    memory.abort.fill_(1)
    return done.wait(30) and waited
