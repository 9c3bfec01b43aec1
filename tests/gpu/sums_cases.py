"""What two ranks run in the tests of sums through peer memory on GPUs: against sums that each of them makes alone."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from ep_runtime.engine.resident import Resident
from tests.distributed.comm_cases import exchange_of
from tests.gpu.recovery_cases import group_of
from tests.support.rank_context import RankContext

EPS = 1e-6
CHOICES = 5


class Case:
    """What every rank brings to a call, made alike on both, and what must come of it."""

    def __init__(self, call: int, rows: int, width: int, rank: int, world: int, dtype: torch.dtype) -> None:
        draw = torch.Generator(device="cuda").manual_seed(call)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", generator=draw).to(dtype)

        parts = [random(rows, width) for _ in range(world)]
        self.mine = parts[rank]
        self.x, self.weight, self.shared, self.gate = random(rows, width), random(width), random(rows, width), random(rows, 1)
        self.experts = torch.rand(rows, 16, device="cuda", generator=draw).topk(CHOICES).indices.to(torch.int32)
        outputs = random(rows * CHOICES, width)
        self.local = torch.where(torch.arange(16, device="cuda") % world == rank, 0, -1)
        foreign = self.local[self.experts.long()].flatten() < 0
        self.outputs = outputs.masked_fill(foreign[:, None], float("nan"))
        self.total = _ordered(parts).to(dtype)
        self.chosen = _ordered([self._choices(outputs, home, world) for home in range(world)]).to(dtype)

    def _choices(self, outputs: torch.Tensor, home: int, world: int) -> torch.Tensor:
        away = (self.experts % world != home)[:, :, None]
        by_row = outputs.view(-1, CHOICES, outputs.shape[1]).float().masked_fill(away, 0)
        return _ordered(list(by_row.unbind(1))).to(outputs.dtype)

    def norm_error(self, x: torch.Tensor, normed: torch.Tensor) -> float:
        """Of `normed` against float64, relative."""
        wide = x.double()
        exact = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + self.weight.double())
        return float((normed.double() - exact).norm() / exact.norm())


def _ordered(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def sum_on_gpus(ctx: RankContext, *, dtype: str, counts: list[int], width: int, pdl: bool, two_shots: bool) -> dict[str, Any]:
    """Sums of each count of rows, one after another, twice; what was wrong, and a digest of all results."""
    from kernels.pairs import Pairs
    from kernels.peer_sums import reduce_add_norm_rows, reduce_rows

    device, of = torch.device("cuda", ctx.rank), getattr(torch, dtype)
    wrong, digest = [], hashlib.blake2b()
    exchange = exchange_of(ctx)
    with closing(group_of(ctx, 0)) as group:
        group.join_peers(exchange, Resident().peers(ctx.rank, ctx.world, device, of))
        assert group.peers is not None
        memory = replace(group.peers, two_shots=two_shots)
        for call, rows in enumerate(counts * 2):
            case = Case(call, rows, width, ctx.rank, ctx.world, of)
            pairs = Pairs(case.outputs, case.experts, case.local)
            x, both = case.x.clone(), case.x.clone()
            results = {
                "total": (reduce_rows(memory, case.mine, pdl=pdl), case.total),
                "chosen": (reduce_rows(memory, pairs, pdl=pdl), case.chosen),
            }
            normed = reduce_add_norm_rows(memory, case.mine, x, case.weight, EPS, zero_centered=True, pdl=pdl)
            results["x"] = (x, (case.total.float() + case.x.float()).to(of))
            reduce_add_norm_rows(memory, pairs, both, case.weight, EPS, shared=case.shared, shared_gate=case.gate, pdl=pdl)
            wrong += [f"{name} of {rows} rows" for name, (got, exact) in results.items() if not torch.equal(got, exact)]
            more = case.chosen.double() + case.x.double() + case.gate.double().sigmoid() * case.shared.double()
            tolerance = 1e-6 if of == torch.float32 else 4e-3
            if case.norm_error(x, normed) > tolerance or float((both.double() - more).norm() / more.norm()) > tolerance:
                wrong.append(f"norm or shared expert of {rows} rows")
            for result in (*(got for got, _ in results.values()), normed, both):
                digest.update(result.view(torch.uint8).cpu().numpy().tobytes())
        exchange(b"")  # nobody leaves while another still sums
    return {"wrong": wrong, "digest": digest.hexdigest()}
