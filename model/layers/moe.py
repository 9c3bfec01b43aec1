"""Routed experts, spread over the ranks, and the shared expert that every rank has."""

from __future__ import annotations

import torch

from kernels.experts import Held, plan_experts, run_experts
from kernels.router import route
from model.config import MoeConfig
from model.formats import DenseFormat, WeightFormat
from model.layers.build import Build
from model.layers.joined import join, whole
from model.layers.mlp import Mlp
from model.layers.module import StepModule
from model.layers.operators import Pending
from model.layers.step import Step
from model.parallel import Parallel


class Moe(StepModule):
    """Every rank routes every row alike and runs the experts in `held`, its own in local order; who adds the output sums it.

    A shared expert of a routed one's size is `joined` to them where kernels may run: its weights lie behind theirs, and its gate's
    behind the router's (see `model.layers.joined`). Kernels then take it for one more expert, which row t runs on rank
    `t % world` alone: expert `num_experts + r` stands for it on rank r, its index there is that behind the held experts'.
    """

    def __init__(self, config: MoeConfig, hidden: int, held: tuple[int, ...], parallel: Parallel, build: Build) -> None:
        super().__init__()
        self.top_k, self.normalise = config.top_k, config.normalise
        self.num_experts = config.num_experts
        self.router = build.linear(hidden, config.num_experts)
        self.gate_up: WeightFormat = DenseFormat(build.weight(len(held), 2 * config.intermediate, hidden))
        self.down: WeightFormat = DenseFormat(build.expert_down(len(held), hidden, config.intermediate))
        self.shared = self.shared_gate = None
        if config.shared_intermediate:
            self.shared = Mlp(hidden, config.shared_intermediate, build)
            self.shared_gate = build.linear(hidden, 1)
        self.sharers = parallel.world if build.row_major and config.alike else 0
        """Ranks that share out the rows of a joined shared expert; 0 where there is none, or apart."""
        local = torch.full((config.num_experts + self.sharers,), -1, dtype=torch.int64)
        local[list(held)] = torch.arange(len(held))
        if self.sharers and self.shared is not None and self.shared_gate is not None:
            join(self.router.weight, self.shared_gate.weight)
            join(self.gate_up, self.shared.gate_up.weight)
            join(self.down, self.shared.down.weight)
            local[config.num_experts + parallel.rank] = len(held)
        self._held = Held(local, torch.tensor(held, dtype=torch.int64))

    @property
    def held(self) -> Held:
        """Which experts are here, as index tensors on the weights' device."""
        return self._held

    def weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Router, gate_up and down as kernels take them: a joined shared expert and its gate are the last entries."""
        formats = (self.router.weight, self.gate_up, self.down)
        router, gate_up, down = (whole(weight) if self.sharers else weight.dequantize() for weight in formats)
        return router, gate_up, down

    def forward(self, x: torch.Tensor, step: Step) -> Pending:
        """`[T, hidden]` -> this rank's partial sum, on every rank, whatever it holds; a shared expert's output beside or in it."""
        if self._held.local.device != x.device:
            self._held = Held(*(index.to(x.device) for index in self._held))
        pending = Pending(step.operators.experts(self, x, step), partial=True)
        apart = not (self.sharers and step.operators.takes_joined)
        if apart and self.shared is not None and self.shared_gate is not None:
            pending.shared, pending.shared_gate = self.shared(x, step), self.shared_gate(x)
        return pending

    def run(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The torch form of routing and experts: this rank's partial sum `[T, hidden]`."""
        weights, experts = route(self.router(x), self.top_k, self.normalise)
        if step.batch.routing:
            step.routing.append(experts.to(torch.int32))
        form = plan_experts(
            x.shape[0],
            self.top_k,
            self.num_experts,
            self.gate_up.shape[0],
            on_host=x.device.type == "cpu",
            may_wait=not step.batch.decode_only,
        )
        return run_experts(form, x, experts, weights, self._held, self.gate_up.dequantize(), self.down.dequantize())
