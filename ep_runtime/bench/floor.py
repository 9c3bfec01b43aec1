"""The floor of a decode step: the bytes that the busier rank must move through its memory, whatever the program.

Weights are read once a step, those of experts and the rows of a memory bank only where a row chose them; keys and values of the
context are read; recurrent states are read and written. Activations are left out: they stay in caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from model.config import FamilyConfig
from model.families.registry import family_of
from model.parallel import ExpertPlacement, Parallel
from model.reads import WeightBytes
from model.spec import ModelSpec
from model.state.sizes import DTYPE_BYTES, bytes_per_slot

DRAWS = 256
"""Simulated routings of few rows: the mean of the busier rank's hits then moves by less than one percent from seed to seed."""

FEWEST_DRAWS = 32
"""Those of many rows, of which each says more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes:
    """What one decode step of the busier rank moves, in bytes. `experts` are all weights that are read by choice."""

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


def weight_bytes(config: FamilyConfig, parallel: Parallel, placement: ExpertPlacement, nbytes: int, dtype: str) -> WeightBytes:
    """What a step reads of `nbytes`, a rank's weights in `dtype`, as its family counts it. A looped model runs one loop."""
    return family_of(config.architecture).reads(config, parallel, placement, nbytes, dtype)


def step_bytes(
    weights: WeightBytes,
    spec: ModelSpec,
    placement: ExpertPlacement,
    dtype: str,
    *,
    batch: int,
    context: int,
    owners: int = 1,
    hits: float | None = None,
) -> StepBytes:
    """For `batch` sequences of `context` positions each, routing uniform, unless it is given how many experts of a layer it hits.

    The layout of attention is in `weights` and `spec`, which have a rank's part of what is divided, and in the number of `owners`
    that divide the sequences.
    """
    positions = sum(min(context, c.window or context) * c.block_elements(1) for c in spec.caches)
    if hits is None:
        hits = busier_hits(placement, spec.experts_per_token, batch) if spec.moe_layers else 0.0
    state = bytes_per_slot(spec, dtype) if weights.state is None else weights.state
    own = -(-batch // owners)
    return StepBytes(
        experts=round(hits * len(spec.moe_layers) * weights.expert) + batch * weights.row,
        dense=weights.dense,
        head=weights.head,
        cache=own * positions * DTYPE_BYTES[dtype],
        state=2 * own * state,
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
    return _most_hit(tuple(placement.owner(expert)[0] for expert in range(total)), placement.world, top_k, rows)


@cache
def _most_hit(owners: tuple[int, ...], world: int, top_k: int, rows: int) -> float:
    """Of `world` ranks, the mean of the most experts that one is hit in, where expert e is of rank `owners[e]`."""
    ranks = np.array(owners)
    random = np.random.default_rng(0)
    most, draws = 0, max(FEWEST_DRAWS, min(DRAWS, 4 * DRAWS // rows))
    for _ in range(draws):
        chosen = random.random((rows, len(owners))).argpartition(top_k - 1, axis=1)[:, :top_k]
        most += int(np.bincount(ranks[np.unique(chosen)], minlength=world).max())
    return most / draws
