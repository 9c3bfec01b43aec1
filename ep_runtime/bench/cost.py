"""What a step should take: a cost model of few constants, as pure functions. docs/scaling.md says what it is worth.

A decode step is the floor (bytes of the busier rank over the memory's bandwidth, `bench.floor`), a constant for each layer and kind
of layer, a constant for each row and layer, and the collectives. Constants come from `fit` over measured steps of few ranks; those
of links that nobody measured are assumed, and kept apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ep_runtime.bench.floor import StepBytes, step_bytes
from kernels.peer_memory import WORD_ROWS
from model.config import ModelConfig
from model.parallel import ExpertPlacement, Parallel
from model.reads import WeightBytes
from model.spec import LayerKind, ModelSpec
from model.state.sizes import DTYPE_BYTES

LAYOUTS = ("replicated", "tensor", "data")
"""Layouts of attention that the model knows."""

BLOCK_ROWS = 128
"""Of an expert's rows in the kernels for prompts, which are padded to it."""
PAIRED_ROWS = 2
"""Up to this many rows experts run without grouping (`kernels.experts_config`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """Microseconds that `fit` finds. By layer: attention, Gated DeltaNet. `grouping`: by routed layer, beyond PAIRED_ROWS rows.

    `row`: by row and layer.
    """

    attention: float
    delta: float
    grouping: float
    row: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """What collectives go over, in bytes per second and microseconds.

    `inside`: into a GPU from its peers in the host. `reduction`: of a collective of two ranks in one host, what it moves apart.
    `peer`: for each rank of a host beyond the second. `between`: into a GPU from other hosts. `network`: for a collective that
    leaves the host, beyond what it takes inside. `launch`: of the host, for a layer of a step that is no CUDA graph.
    """

    inside: float
    reduction: float
    peer: float
    between: float
    network: float
    launch: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A kind of device, and how its like are linked. `bandwidth` is of its memory, bytes per second.

    `prefill_rate` is operations per second of prompt rows; `prefill_fixed` seconds of each step with them, `prefill_delta` of
    each row in each Gated DeltaNet layer with all its heads, whose own kernels are in no count of operations.
    """

    device: str
    bandwidth: float
    fitted: Fitted
    links: Links
    prefill_rate: float
    prefill_fixed: float
    prefill_delta: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCosts:
    """What a step of one model reads. `expert` and `dense` are bytes of weights, as `model.reads.WeightBytes` has them."""

    name: str
    config: ModelConfig
    spec: ModelSpec
    dtype: str
    expert: int
    dense: int

    @property
    def element(self) -> int:
        """Bytes of an activation's element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def every_rank(self) -> int:
        """Bytes of `dense` that no layout of attention divides: routers and shared experts."""
        moe = self.config.moe
        if moe is None:
            return 0
        width = self.config.hidden_size * self.element
        return len(self.spec.moe_layers) * width * (moe.num_experts + 3 * moe.shared_intermediate)

    def layers(self, kind: LayerKind) -> int:
        """Layers that mix tokens by Gated DeltaNet (LINEAR), or by attention (anything else)."""
        linear = sum(each is LayerKind.LINEAR for each in self.spec.layer_kinds)
        return linear if kind is LayerKind.LINEAR else self.spec.num_layers - linear


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What runs: `batch` sequences of `context` positions, on `hosts` hosts of `per_host` ranks.

    `by_host`: a collective over several hosts first sums inside each, and each of its GPUs exchanges a share of the rows. `graph`:
    steps are CUDA graphs. `stay`: rows of layout `data` stay with the ranks that keep their sequences, from which a routed layer
    gathers them, and to which it scatters sums; else, as over several hosts, a layer takes two sums of all rows. `hits` are the
    experts of a layer that the rank's rows choose; None: those of the busier rank. `alone`: a rank without the others, whose
    collectives take no time.
    """

    batch: int
    context: int = 160
    per_host: int = 1
    hosts: int = 1
    layout: str = "replicated"
    by_host: bool = False
    graph: bool = True
    stay: bool = False
    hits: float | None = None
    alone: bool = False

    @property
    def world(self) -> int:
        """All ranks."""
        return self.hosts * self.per_host


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Milliseconds of a decode step on the device by part, and those of the host's launches, which run beside it."""

    floor: float
    layers: float
    rows: float
    collectives: float
    launches: float

    @property
    def device(self) -> float:
        """On the device."""
        return self.floor + self.layers + self.rows + self.collectives

    @property
    def total(self) -> float:
        """From step to step."""
        return max(self.device, self.launches)


def rank_bytes(model: ModelCosts, case: Case) -> StepBytes:
    """What the busier rank moves in a decode step. Raises ValueError for a layout that is not one of LAYOUTS.

    `tensor` divides what mixes tokens (keys and values by at most their heads); `data` divides the sequences.
    """
    if case.layout not in LAYOUTS:
        raise ValueError(f"layout is {case.layout!r}, known are {', '.join(LAYOUTS)}")
    world = case.world
    row = model.config.hidden_size * model.element
    weights = WeightBytes(
        expert=model.expert, head=Parallel(0, world).vocab_shard(model.config.vocab_size) * row, dense=model.dense
    )
    placement = ExpertPlacement.build(model.spec.num_experts, world)
    parts = step_bytes(weights, model.spec, placement, model.dtype, batch=case.batch, context=case.context, hits=case.hits)
    if case.layout == "tensor":
        kv_heads = min(cache.kv_heads for cache in model.spec.caches)
        dense = model.every_rank + (model.dense - model.every_rank) // world
        return replace(parts, dense=dense, cache=parts.cache // min(world, kv_heads), state=parts.state // world)
    if case.layout == "data":
        own = -(-case.batch // world)
        return replace(parts, cache=parts.cache * own // case.batch, state=parts.state * own // case.batch)
    return parts


def collectives(model: ModelCosts, layout: str, world: int, *, stay: bool = False) -> int:
    """Sums of a step: one a routed layer when attention is everywhere, else two a layer; the head's gather left out.

    Where rows of layout `data` stay with their owners, gathers and scatters: two a routed layer, and the last gather.
    """
    if world == 1:
        return 0
    if layout == "data" and stay:
        return 2 * len(model.spec.moe_layers) + 1
    return len(model.spec.moe_layers) if layout == "replicated" else 2 * model.spec.num_layers


def collective_us(machine: Machine, case: Case, part_bytes: float) -> float:
    """Microseconds of a sum of each rank's `part_bytes` of `case.batch` rows, or of a gather or scatter of these.

    More than two ranks of a host take words for a few rows, which carry twice the bytes, and two shots for more (`Peers`).
    """
    links, inside = machine.links, machine.links.reduction
    if case.world == 1:
        return 0.0
    near = inside + links.peer * (case.per_host - 2) if case.per_host > 1 else 0.0
    near_bytes = (case.per_host - 1) * part_bytes
    if case.layout == "data" and case.stay:
        # What the busiest rank receives of its rows in a scatter, and sends of them in a gather.
        near_bytes *= -(-case.batch // case.world) / case.batch
        words = 2 if case.per_host > 2 and case.batch <= WORD_ROWS // (case.per_host - 1) else 1
        return near + words * near_bytes / links.inside * 1e6
    if case.hosts == 1:
        if case.per_host == 2:
            return near + near_bytes / links.inside * 1e6
        if case.batch <= WORD_ROWS // (case.per_host - 1):
            return near + 2 * near_bytes / links.inside * 1e6
        return 2 * near + two_shot_bytes(case.per_host, part_bytes) / links.inside * 1e6
    if case.by_host:
        # Each GPU of a host sums a share of the rows, exchanges it with its like, and shows it to its host's others.
        share = near_bytes / case.per_host / links.inside * 1e6
        far_bytes = (case.hosts - 1) * part_bytes / case.per_host
        return 2 * (near + share) + links.network + far_bytes / links.between * 1e6
    # A host's GPUs share what comes from the others, and show it to each other.
    far_bytes = (case.hosts - 1) * part_bytes
    within = (case.world - 1) * part_bytes / links.inside * 1e6
    return near + within + links.network + far_bytes / links.between * 1e6


def two_shot_bytes(ranks: int, part_bytes: float) -> float:
    """Bytes that a rank receives in a sum of partials of `part_bytes`: its own rows of all others', and the others' sums."""
    return 2 * (ranks - 1) / ranks * part_bytes


def decode_step(machine: Machine, model: ModelCosts, case: Case) -> StepCost:
    """A steady decode step."""
    fitted, layers = machine.fitted, model.spec.num_layers
    fixed = fitted.attention * model.layers(LayerKind.FULL) + fitted.delta * model.layers(LayerKind.LINEAR)
    if case.batch > PAIRED_ROWS:
        fixed += fitted.grouping * len(model.spec.moe_layers)
    part = case.batch * model.config.hidden_size * model.element
    count = 0 if case.alone else collectives(model, case.layout, case.world, stay=case.stay)
    return StepCost(
        floor=rank_bytes(model, case).milliseconds(machine.bandwidth),
        layers=fixed / 1e3,
        rows=fitted.row * case.batch * layers / 1e3,
        collectives=count * collective_us(machine, case, part) / 1e3,
        launches=0.0 if case.graph else machine.links.launch * layers / 1e3,
    )


def mixing_share(case: Case, rows: int, step_rows: int) -> float:
    """The part of what mixes the tokens of prompts that the busiest rank computes, from 0 to 1.

    In layout `data` prompt i is of rank i modulo the ranks, a step takes prompts in order, and ends with its busiest rank: of a
    single prompt one rank computes everything.
    """
    if case.layout != "data":
        return 1.0 if case.layout == "replicated" else 1 / case.world
    owners = np.arange(rows) // case.context % case.world
    steps = [owners[start : start + step_rows] for start in range(0, rows, step_rows)]
    return sum(int(np.bincount(step).max()) for step in steps) / rows


def padding(model: ModelCosts, rows: int) -> float:
    """Rows of the expert kernels' blocks over those that are in them, in a step of `rows` rows that choose evenly; 1 for none.

    The rows of an expert are taken as Poisson distributed; each expert's last block is not full.
    """
    moe = model.config.moe
    if moe is None or rows == 0:
        return 1.0
    mean = rows * moe.top_k / moe.num_experts
    counts = np.arange(1, int(mean + 10 * math.sqrt(mean)) + 2 * BLOCK_ROWS)
    log_factorials = np.cumsum(np.log(counts))
    weights = np.exp(counts * math.log(mean) - mean - log_factorials)
    return float((weights * -(-counts // BLOCK_ROWS)).sum()) * BLOCK_ROWS / mean


def prefill_flops(model: ModelCosts, world: int, context: int, share: float, padded: float = 1.0) -> float:
    """Operations of one prompt row on one rank, of a prompt of `context` positions, half of which a mean row sees.

    Two for each weight that it meets, and in attention four for each position and element of a head. `share` is `mixing_share`,
    `padded` the `padding` of experts.
    """
    moe, attention = model.config.moe, model.config.attention
    active = 0.0 if moe is None else model.expert * moe.top_k * len(model.spec.moe_layers) / world * padded
    own = model.every_rank + (model.dense - model.every_rank) * share
    seen = model.layers(LayerKind.FULL) * attention.heads * attention.head_dim * context / 2
    return 2 * (own + active) / model.element + 4 * seen * share


def prefill_seconds(machine: Machine, model: ModelCosts, case: Case, *, rows: int, step_rows: int) -> float:
    """To take in `rows` rows of prompts of `case.context` in steps of at most `step_rows`, with their collectives."""
    steps = -(-rows // step_rows)
    part = rows * model.config.hidden_size * model.element
    # The latency is part of `prefill_fixed`; the bytes are not.
    share = mixing_share(case, rows, step_rows)
    near = two_shot_bytes(case.per_host, part) if case.hosts == 1 else (case.world - 1) * part
    # Of more ranks than two, steps whose busiest rank keeps too much of them take sums (`FusedOperators.rows_stay`).
    stay = case.stay and (case.world == 2 or share * case.world < 2)
    if case.layout == "data" and stay:
        near = (case.world - 1) * share * part
    moved = near / machine.links.inside + (case.hosts - 1) * part / machine.links.between
    sums = 0.0 if case.alone else collectives(model, case.layout, case.world, stay=stay) * moved
    last = rows - (steps - 1) * step_rows
    padded = ((rows - last) * padding(model, step_rows) + last * padding(model, last)) / rows
    a_row = prefill_flops(model, case.world, case.context, share, padded) / machine.prefill_rate
    a_row += model.layers(LayerKind.LINEAR) * machine.prefill_delta * share
    return steps * machine.prefill_fixed + rows * a_row + sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Requests handed over at once, measured: what ran, in steps of at most `step_rows`, and the seconds to the last token."""

    model: ModelCosts
    case: Case
    requests: int
    prompt_len: int
    new_tokens: int
    seconds: float
    step_rows: int

    @property
    def rows(self) -> int:
        """Of all prompts."""
        return self.requests * self.prompt_len

    @property
    def prompts(self) -> Case:
        """The case while prompts are taken in."""
        return replace(self.case, context=self.prompt_len)


def fit_prompts(machine: Machine, loads: Sequence[Load]) -> Machine:
    """The machine with the constants of prompts that fit loads of one new token best, by least squares of relative errors.

    Raises ValueError when they do not determine them.
    """
    none = replace(machine, prefill_rate=math.inf, prefill_fixed=0.0, prefill_delta=0.0)
    each = [none, replace(none, prefill_rate=1.0), replace(none, prefill_fixed=1.0), replace(none, prefill_delta=1.0)]
    known = [
        [prefill_seconds(one, load.model, load.prompts, rows=load.rows, step_rows=load.step_rows) for one in each] for load in loads
    ]
    sums, *parts = np.array(known).T
    seconds = np.array([load.seconds for load in loads])
    matrix = np.stack([part - sums for part in parts], axis=1)
    found, _, rank, _ = np.linalg.lstsq(matrix / seconds[:, None], 1 - sums / seconds, rcond=None)
    if rank < len(found) or found.min() < 0:
        raise ValueError(f"{len(loads)} loads do not determine the constants of prompts: rank {rank}, {found.tolist()}")
    inverse, fixed, delta = (float(value) for value in found)
    return replace(machine, prefill_rate=1 / inverse, prefill_fixed=fixed, prefill_delta=delta)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One measured decode step: milliseconds, and the bandwidth of its run in bytes per second."""

    model: ModelCosts
    case: Case
    milliseconds: float
    bandwidth: float


def fit(machine: Machine, steps: Sequence[Measured]) -> Fitted:
    """The constants that fit `steps` best, by least squares of relative errors. ValueError when they do not determine them."""
    matrix = np.array([_features(step) for step in steps])
    target = np.array([_beyond_floor(machine, step) for step in steps])
    weight = 1 / np.array([step.milliseconds for step in steps])
    found, _, rank, _ = np.linalg.lstsq(matrix * weight[:, None], target * weight, rcond=None)
    if rank < len(found) or found.min() < 0:
        raise ValueError(f"{len(steps)} steps do not determine the constants: rank {rank}, {found.round(2).tolist()}")
    attention, delta, grouping, row = (float(value) for value in found)
    return Fitted(attention=attention, delta=delta, grouping=grouping, row=row)


def _features(step: Measured) -> list[float]:
    """How often each constant is in the step, in the order of `Fitted`."""
    model, case = step.model, step.case
    return [
        model.layers(LayerKind.FULL),
        model.layers(LayerKind.LINEAR),
        len(model.spec.moe_layers) if case.batch > PAIRED_ROWS else 0,
        case.batch * model.spec.num_layers,
    ]


def _beyond_floor(machine: Machine, step: Measured) -> float:
    """Microseconds that the constants have to account for."""
    none = Fitted(attention=0.0, delta=0.0, grouping=0.0, row=0.0)
    known = decode_step(replace(machine, bandwidth=step.bandwidth, fitted=none), step.model, step.case)
    return (step.milliseconds - known.device) * 1e3
