"""The floor of a load of many requests: for each step that was launched, what its bytes and its products must take at least.

A step moves the weights that its rows hit, the keys and values of its contexts, and its sequences' recurrent states; it multiplies
each row by the weights of its experts and all dense ones, and each sampled row by the head. The floor is the longer of the two,
summed over the steps. Products of attention and activations are left out, so it stays a lower bound; so does the number of experts
hit, which is interpolated between powers of two. Where ranks divide the sequences, each is taken to have its even share of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ep_runtime.bench.floor import busier_hits
from ep_runtime.scheduler.core import Plan
from model.parallel import ExpertPlacement
from model.reads import WeightBytes
from model.spec import ModelSpec
from model.state.sizes import DTYPE_BYTES, bytes_per_slot


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadFloor:
    """Sums over all steps of the busier rank: seconds that they must take, bytes moved, operations, rows and steps."""

    seconds: float
    bytes: float
    flops: float
    rows: int
    steps: int


class FloorModel:
    """What the steps of one model cost at least on one rank. `bandwidth` in bytes, `peak` in operations per second."""

    def __init__(
        self,
        weights: WeightBytes,
        spec: ModelSpec,
        placement: ExpertPlacement,
        dtype: str,
        *,
        bandwidth: float,
        peak: float,
        owners: int = 1,
    ) -> None:
        self._weights = weights
        self._spec = spec
        self._element = DTYPE_BYTES[dtype]
        self._state = 2 * (bytes_per_slot(spec, dtype) if weights.state is None else weights.state)
        self._world = placement.world
        self._bandwidth = bandwidth
        self._peak = peak
        self._owners = owners
        self._counts, self._hits = hit_table(placement, spec.experts_per_token) if spec.moe_layers else ([0, 1], [0.0, 0.0])

    def of_plans(self, plans: Sequence[Plan]) -> LoadFloor:
        """The sums over `plans`, of which every one has spans."""
        steps = [self.of_step(plan) for plan in plans]
        return LoadFloor(
            seconds=sum(max(moved / self._bandwidth, flops / self._peak) for moved, flops in steps),
            bytes=sum(moved for moved, _ in steps),
            flops=sum(flops for _, flops in steps),
            rows=sum(span.length for plan in plans for span in plan.spans),
            steps=len(plans),
        )

    def of_step(self, plan: Plan) -> tuple[float, float]:
        """Bytes and operations of one step."""
        weights, layers = self._weights, len(self._spec.moe_layers)
        rows = sum(span.length for span in plan.spans)
        sampled = sum(span.sampled for span in plan.spans)
        ends = [span.start + span.length for span in plan.spans]
        cached = sum(sum(min(end, c.window or end) for end in ends) * c.block_elements(1) for c in self._spec.caches)
        experts = float(np.interp(rows, self._counts, self._hits)) * layers * weights.expert + rows * weights.row
        kept = (cached * self._element + self._state * len(plan.spans)) / self._owners
        moved = experts + weights.dense + (weights.head if sampled else 0) + kept
        # Of a row's experts the busier rank has no less than its even share.
        chosen = self._spec.experts_per_token * layers * weights.expert / self._world
        flops = 2 * (rows * (weights.dense / self._owners + chosen) + sampled * weights.head) / self._element
        return moved, flops


def hit_table(placement: ExpertPlacement, top_k: int) -> tuple[list[int], list[float]]:
    """Row counts, and the mean number of experts of a layer that so many rows hit on the busier rank; more rows hit no more."""
    counts = [0, 1]
    while (1 - top_k / placement.num_experts) ** counts[-1] > 1e-4:
        counts.append(2 * counts[-1])
    return counts, [0.0, *(busier_hits(placement, top_k, count) for count in counts[1:])]
