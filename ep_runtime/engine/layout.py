"""Which layout of attention a server runs: as asked, or for `auto` what a cost model says, alike on every rank.

`tensor` reads less memory in a step (weights of attention, keys and values, recurrent states, dense MLPs) and adds sums over ranks:
of every layer's attention, and of its MLP where that is dense. Both are counted for one decode step of a usual load. What the two
layouts have in common is left out. `data` divides the sequences, for the sake of their room, and is taken where it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from ep_runtime.engine.vision.cost import chunk_cost
from model.config import FamilyConfig, ModelConfig
from model.errors import UnsupportedModel
from model.families.registry import family_of, spec_of
from model.share import share
from model.spec import ModelSpec
from model.state.sizes import DTYPE_BYTES, bytes_per_slot

USUAL_SEQUENCES = 32
"""Sequences of the step that is counted, if the server may run as many at once."""
USUAL_CONTEXT = 1024
"""Positions of each, if the server allows as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Of one kind of GPU in one host: bytes per second of its memory and into it from its peers, microseconds of a sum over ranks.

    `sum_us` is that of two ranks without what it moves, `peer_us` what each further rank adds.
    """

    memory: float
    inside: float
    sum_us: float
    peer_us: float


LINKS = {"NVIDIA H200": Links(memory=4.27e12, inside=3.26e11, sum_us=1.4, peer_us=1.0)}
"""By the device's name, from docs/scaling.md: a copy's bandwidth, NCCL's rate at 32 MB, a sum of one row in a graph less the norm
in it; `peer_us` is assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What `auto` looks at beside the model. `device` is the GPU's name, or "cpu"; `one_host` says that all ranks are on one."""

    world: int
    device: str
    one_host: bool
    dtype: str
    max_num_seqs: int
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Layout:
    """A decision, and why: a phrase for the log."""

    name: str
    reason: str


def choose_layout(asked: str, config: FamilyConfig, machine: Machine) -> Layout:
    """What was asked, or for "auto" the layout whose usual decode step should be shorter: `replicated` if nothing was measured."""
    if asked != "auto":
        return Layout(asked, "as configured")
    links = LINKS.get(machine.device)
    if machine.world == 1:
        return Layout("replicated", "there is one rank")
    if not machine.one_host or links is None:
        where = machine.device if machine.one_host else "several hosts"
        return Layout("replicated", f"sums over ranks were not measured on {where}")
    try:
        divided = family_of(config.architecture).split(config, machine.world)
    except UnsupportedModel as error:
        return Layout("replicated", str(error))
    assert isinstance(config, ModelConfig), "models of other kinds are not divided"
    assert isinstance(divided, ModelConfig)
    return _shorter(config, divided, links, machine)


def _shorter(config: ModelConfig, divided: ModelConfig, links: Links, machine: Machine) -> Layout:
    whole, own = spec_of(config), spec_of(divided)
    sequences, context = _usual_load(machine, whole)
    weights = (chunk_cost(config, 1) - chunk_cost(share(divided), 1)) / 2 * DTYPE_BYTES[machine.dtype]
    kept = [_sequence_bytes(spec, context, machine.dtype) for spec in (whole, own)]
    saved = (weights + sequences * (kept[0] - kept[1])) / links.memory * 1e6
    more = 2 * len(config.layers) - len(config.moe_layers)
    part = sequences * config.hidden_size * DTYPE_BYTES[machine.dtype]
    others = machine.world - 1
    cost = more * (links.sum_us + links.peer_us * (others - 1) + others * part / links.inside * 1e6)
    load = f"a decode step of {sequences} sequences of {context} positions"
    reason = f"in {load}, dividing heads saves {saved:.0f} us of memory traffic, and {more} more sums over ranks take {cost:.0f} us"
    return Layout("tensor" if saved > cost else "replicated", reason)


def _usual_load(machine: Machine, spec: ModelSpec) -> tuple[int, int]:
    longest = machine.max_model_len or spec.max_positions
    return min(USUAL_SEQUENCES, machine.max_num_seqs), min(USUAL_CONTEXT, longest)


def _sequence_bytes(spec: ModelSpec, context: int, dtype: str) -> int:
    """What a step moves of one sequence on one rank: its keys and values once, its recurrent states twice."""
    cached = sum(min(context, cache.window or context) * cache.block_elements(1) for cache in spec.caches)
    return cached * DTYPE_BYTES[dtype] + 2 * bytes_per_slot(spec, dtype)
