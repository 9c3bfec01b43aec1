"""The expert layer of a decode step, timed in one graph as a model launches it: norm, router, experts, each after the other.

Programmatic launches overlap a kernel with the one before it, so what a tile is worth shows only among its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ep_runtime.bench.experts_check import local_experts
from ep_runtime.bench.experts_shapes import Model
from ep_runtime.bench.timing import time_us
from kernels.experts_config import ExpertsConfig
from kernels.experts_triton import moe_experts
from kernels.rms_norm_triton import add_norm_rows
from kernels.router_triton import COUNTERS, route_rows


class Chain:
    """Inputs of several layers in a row that share their weights, with choices such that each reads what the one before did not."""

    def __init__(self, model: Model, rows: int, layers: int, weights: tuple[torch.Tensor, torch.Tensor], seed: int = 0) -> None:
        self.model, self.rows = model, rows
        self.gate_up, self.down = weights
        draw = torch.Generator().manual_seed(seed)
        self.local = local_experts(model.experts, model.held)
        self.router = torch.randn(model.experts, model.hidden, generator=draw).bfloat16().cuda()
        self.turns = torch.zeros(COUNTERS, dtype=torch.int32, device="cuda")
        self.norm = torch.full((model.hidden,), model.hidden**-0.5, dtype=torch.bfloat16, device="cuda")
        self.choices = [planned_choices(model, rows, layer, draw).cuda() for layer in range(layers)]
        # A row that is the sum of some experts' router rows has its largest logits at them.
        self.x = [self.router[choices].sum(1) for choices in self.choices]
        self.delta = torch.zeros(rows, model.hidden, dtype=torch.bfloat16, device="cuda")

    def cost(self) -> float:
        """Bytes of the experts that a mean layer reads."""
        each = (self.gate_up[0].numel() + self.down[0].numel()) * self.gate_up.element_size()
        hit = [self.local[choices].flatten() for choices in self.choices]
        return sum(mine[mine >= 0].unique().numel() for mine in hit) * each / len(hit)

    def layer(self, number: int, config: ExpertsConfig) -> torch.Tensor:
        """One layer's launches; its output."""
        x = add_norm_rows(self.x[number], self.delta, self.norm, 1e-6, pdl=True)
        weights, experts, groups = route_rows(
            x, self.router, self.model.top_k, True, self.turns, self.local, self.model.held, config.block_rows, pdl=True
        )
        return moe_experts(x, experts, weights, self.local, self.gate_up, self.down, config=config, groups=groups)

    def routing(self, number: int, block_rows: int) -> object:
        """The launches in front of the experts alone."""
        x = add_norm_rows(self.x[number], self.delta, self.norm, 1e-6, pdl=True)
        return route_rows(x, self.router, self.model.top_k, True, self.turns, self.local, self.model.held, block_rows, pdl=True)

    def time(self, call: Callable[[int], object]) -> float:
        """Microseconds of a mean layer."""
        return time_us([partial(call, number) for number in range(len(self.x))])


def planned_choices(model: Model, rows: int, layer: int, draw: torch.Generator) -> torch.Tensor:
    """Experts `[rows, k]`: of one row this rank's share, and none that the layer before chose; else random."""
    if rows > 1:
        return torch.rand(rows, model.experts, generator=draw).topk(model.top_k).indices
    at = torch.arange(layer * model.top_k, (layer + 1) * model.top_k)
    return (at % model.ranks * model.held + at // model.ranks % model.held)[None]
