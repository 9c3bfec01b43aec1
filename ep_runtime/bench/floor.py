"""The floor of a decode step: the bytes that the busier rank must move through its memory, whatever the program.

Weights are read once a step, those of experts only where a row chose them; keys and values of the context are read; recurrent
states are read and written. Activations are left out: they stay in caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.config import ModelConfig
from model.parallel import ExpertPlacement, Parallel
from model.spec import ModelSpec
from model.state.sizes import DTYPE_BYTES, bytes_per_slot

DRAWS = 256
"""Simulated routings: the mean of the busier rank's hits then moves by less than one percent from seed to seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBytes:
    """One rank's weights: one expert of one layer, the vocabulary shard of the head, and all else that each step reads."""

    expert: int
    head: int
    dense: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes:
    """What one decode step of the busier rank moves, in bytes."""

    experts: int
    dense: int
    head: int
    cache: int
    state: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.experts + self.dense + self.head + self.cache + self.state

    def milliseconds(self, bytes_per_second: float) -> float:
        """The floor in milliseconds."""
        return self.total / bytes_per_second * 1e3


def weight_bytes(config: ModelConfig, parallel: Parallel, placement: ExpertPlacement, nbytes: int, dtype: str) -> WeightBytes:
    """Split `nbytes`, all weights of one rank in `dtype`. The embedding is not among the parts: a step reads a row a sequence."""
    element = DTYPE_BYTES[dtype]
    row = config.hidden_size * element
    shard = parallel.vocab_shard(config.vocab_size) * row
    ends = parallel.world * shard if config.tied else config.vocab_size * row + shard
    expert = 3 * config.moe.intermediate * row if config.moe is not None else 0
    held = len(placement.local(parallel.rank)) * len(config.moe_layers)
    return WeightBytes(expert=expert, head=shard, dense=nbytes - ends - held * expert)


def step_bytes(
    weights: WeightBytes, spec: ModelSpec, placement: ExpertPlacement, dtype: str, *, batch: int, context: int
) -> StepBytes:
    """For `batch` sequences of `context` positions each, attention and states on every rank, routing uniform."""
    positions = sum(min(context, c.window or context) * c.block_elements(1) for c in spec.caches)
    hits = busier_hits(placement, spec.experts_per_token, batch) if spec.moe_layers else 0.0
    return StepBytes(
        experts=round(hits * len(spec.moe_layers) * weights.expert),
        dense=weights.dense,
        head=weights.head,
        cache=batch * positions * DTYPE_BYTES[dtype],
        state=2 * batch * bytes_per_slot(spec, dtype),
    )


def split(parts: StepBytes, world: int) -> StepBytes:
    """The same step if the replicated parts (attention and its caches, states, shared experts) were divided among the ranks."""
    return StepBytes(
        experts=parts.experts,
        dense=parts.dense // world,
        head=parts.head,
        cache=parts.cache // world,
        state=parts.state // world,
    )


def busier_hits(placement: ExpertPlacement, top_k: int, rows: int) -> float:
    """Expected number of experts of one layer that `rows` rows hit on the rank where most are hit.

    One rank: E (1 - (1 - k/E)^rows) of its E experts. Several: the mean of seeded draws, for the maximum has no short form.
    """
    total = placement.num_experts
    if placement.world == 1:
        return float(total * (1 - (1 - top_k / total) ** rows))
    owners = np.array([placement.owner(expert)[0] for expert in range(total)])
    random = np.random.default_rng(0)
    most = 0
    for _ in range(DRAWS):
        chosen = random.random((rows, total)).argpartition(top_k - 1, axis=1)[:, :top_k]
        most += int(np.bincount(owners[np.unique(chosen)], minlength=placement.world).max())
    return most / DRAWS
