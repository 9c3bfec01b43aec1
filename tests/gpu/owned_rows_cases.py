"""What ranks run in the tests of rows that stay with their owners on GPUs: against sums that each of them makes alone."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import torch

from ep_runtime.engine.resident import Resident
from tests.distributed.comm_cases import exchange_of
from tests.distributed.owned_rows_cases import LEFT
from tests.gpu.recovery_cases import group_of
from tests.gpu.sums_cases import EPS, Case
from tests.support.rank_context import RankContext


def owners_of(call: int, rows: int, world: int) -> torch.Tensor:
    """Mixed; every third call all rows are of one rank, which changes."""
    row = torch.arange(rows, device="cuda")
    return torch.full_like(row, call // 3 % world) if call % 3 == 2 else (row * 5 + call) // 2 % world


def move_on_gpus(ctx: RankContext, *, dtype: str, counts: list[int], width: int, pdl: bool, two_shots: bool) -> list[str]:
    """Scatters, gathers and sums of each count of rows, one after another, twice, without a wait of the host: what was wrong."""
    from kernels.pairs import Pairs
    from kernels.peer_rows import gather_add_norm_rows, gather_owned_rows, scatter_add_norm_rows
    from kernels.peer_sums import reduce_add_norm_rows

    device, of = torch.device("cuda", ctx.rank), getattr(torch, dtype)
    found = []
    exchange = exchange_of(ctx)
    with closing(group_of(ctx, 0)) as group:
        group.join_peers(exchange, Resident().peers(ctx.rank, ctx.world, device, of))
        assert group.peers is not None
        memory = replace(group.peers, two_shots=two_shots)
        for call, rows in enumerate(counts * 2):
            case, owners = Case(call, rows, width, ctx.rank, ctx.world, of), owners_of(call, rows, ctx.world)
            own = owners == ctx.rank
            pairs = Pairs(case.outputs, case.experts, case.local)
            x, whole = (case.x.masked_fill(~own[:, None], LEFT) for _ in range(2))
            of_sum, added = case.x.clone(), {"shared": case.shared, "shared_gate": case.gate, "pdl": pdl}
            normed = scatter_add_norm_rows(memory, pairs, owners, x, case.weight, EPS, **added)
            exact = reduce_add_norm_rows(memory, pairs, of_sum, case.weight, EPS, **added)
            mixed = case.total.masked_fill(~own[:, None], float("nan"))
            gathered = gather_add_norm_rows(memory, mixed, owners, whole, case.weight, EPS, zero_centered=True, pdl=pdl)
            shown = normed.clone()
            gather_owned_rows(memory, shown, owners, pdl=pdl)
            found.append((case, own, x, of_sum, normed, exact, whole, gathered, shown))
        torch.cuda.synchronize()
        exchange(b"")  # nobody leaves while another still reads
    wrong = []
    tolerance = 1e-6 if of == torch.float32 else 4e-3
    for call, (case, own, x, of_sum, normed, exact, whole, gathered, shown) in enumerate(found):
        after = (case.total.float() + case.x.float()).to(of)
        checks = {
            "residual": torch.equal(x[own], of_sum[own]),
            "norm": torch.equal(normed[own], exact[own]),
            "another rank's residual": bool((x[~own] == LEFT).all()),
            "residual of the gather": torch.equal(whole[own], after[own]),
            "gathered norm": case.norm_error(after, gathered) <= tolerance,
            "rows that owners have shown": torch.equal(shown, exact),
        }
        wrong += [f"{name} of call {call}, {len(own)} rows" for name, right in checks.items() if not right]
    return wrong
