"""Expert kernels and the router on a GPU: timed over candidates, the best kept as a tuning table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ep_runtime.bench.experts_candidates import GROUPED, PAIRED, PAIRED_UP_TO, block_rows
from ep_runtime.bench.experts_chain import Chain
from ep_runtime.bench.experts_check import local_experts, random_weights
from ep_runtime.bench.experts_shapes import MODELS, Model
from ep_runtime.bench.timing import floor_us, time_us
from kernels.experts_config import ExpertsConfig, Form, Tile, default_config, experts_shape
from kernels.experts_grouped import combine, down_grouped, gate_up_grouped
from kernels.experts_persistent import down_persistent, gate_up_persistent
from kernels.experts_triton import moe_experts
from kernels.grouping import group_pairs
from kernels.router_triton import COUNTERS, FUSED_ROWS, route_logits, route_rows


class Layer:
    """Random weights of one layer, and different inputs and choices for each of several calls."""

    def __init__(self, model: Model, rows: int, calls: int, weights: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.model, self.rows = model, rows
        self.gate_up, self.down = weights
        self.local = local_experts(model.experts, model.held)
        self.x = [torch.randn(rows, model.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(calls)]
        chosen = [route_logits(torch.randn(rows, model.experts, device="cuda"), model.top_k, True) for _ in range(calls)]
        self.weights, self.experts = [w for w, _ in chosen], [e for _, e in chosen]

    def cost(self) -> tuple[float, float]:
        """Bytes of the experts hit and operations of the pairs held, of a mean call."""
        expert_bytes = (self.gate_up[0].numel() + self.down[0].numel()) * self.gate_up.element_size()
        num_bytes = flops = 0.0
        for experts in self.experts:
            mine = self.local[experts]
            mine = mine[mine >= 0]
            num_bytes += mine.unique().numel() * expert_bytes / len(self.experts)
            flops += mine.numel() * 2 * expert_bytes / self.gate_up.element_size() / len(self.experts)
        return num_bytes, flops


@dataclass(slots=True)
class Timed:
    """Times in microseconds of one model and number of rows, and the best configuration."""

    model: str
    rows: int
    floor: float
    num_bytes: float
    flops: float
    parts: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    best: float = float("inf")
    config: dict[str, Any] | None = None
    candidates: list[dict[str, Any]] = field(default_factory=list)

    def offer(self, label: str, micros: float, config: ExpertsConfig) -> None:
        """Keep a whole layer's time, and its configuration if it is the fastest so far."""
        self.totals[label] = micros
        if micros < self.best:
            self.best, self.config = micros, config.plain()

    def line(self) -> str:
        """One row of the table."""
        rate = f"{self.flops / self.best / 1e6:7.0f} TF" if self.rows >= 512 else f"{self.num_bytes / self.best / 1e3:7.0f} GB/s"
        parts = " ".join(f"{name} {micros:.1f}" for name, micros in self.parts.items())
        totals = " ".join(f"{name} {micros:.1f}" for name, micros in self.totals.items())
        return f"{self.model:10} T {self.rows:5} floor {self.floor:7.1f} best {self.best:8.1f} {rate} | {totals} | {parts}"


def time_experts(key: str, rows: int, weights: tuple[torch.Tensor, torch.Tensor]) -> Timed:
    """The best tile of each kernel, then whole layers made of them, with and without programmatic launch."""
    calls = 4 if rows <= 256 else 2
    layer = Layer(MODELS[key], rows, calls, weights)
    num_bytes, flops = layer.cost()
    timed = Timed(key, rows, floor_us(num_bytes, flops), num_bytes, flops)
    configs = [("default", default_config(rows, layer.model.top_k, layer.model.held))]
    for block_m in block_rows(rows, layer.model.top_k, layer.model.experts):
        configs += _best_grouped(layer, block_m, timed)
    for label, config in configs:
        for pdl in (False, True):
            whole = ExpertsConfig(form=config.form, gate_up=config.gate_up, down=config.down, pdl=pdl)
            name = label + "+pdl" * pdl
            micros = _attempt(name, timed, partial(time_us, _each(layer, partial(moe_experts, config=whole))))
            if micros is not None:
                timed.offer(name, micros, whole)
    report(timed.line())
    return timed


def time_decode(key: str, rows: int, weights: tuple[torch.Tensor, torch.Tensor]) -> Timed:
    """As `time_experts`, of layers as decode steps launch them (`experts_chain`), norm and router included."""
    model = MODELS[key]
    chain = Chain(model, rows, 24 if rows <= 2 else 8 if rows <= 32 else 4, weights)
    num_bytes = chain.cost()
    timed = Timed(key, rows, floor_us(num_bytes, 0.0), num_bytes, 0.0)
    forms: list[tuple[Form, str, list[Tile], list[Tile]]] = []
    if rows <= PAIRED_UP_TO:
        forms.append(("paired", "paired", PAIRED["gate_up"], PAIRED["down"]))
    for block_m in block_rows(rows, model.top_k, model.experts):
        forms.append(("grouped", f"grouped.{block_m}", GROUPED[block_m]["gate_up"], GROUPED[block_m]["down"]))
    for form, label, gate_ups, downs in forms:
        timed.parts["routing." + label] = chain.time(
            partial(chain.routing, block_rows=downs[0].block_m if form == "grouped" else 0)
        )
        made = _descend(chain, timed, form, label, gate_ups, downs)
        if made:
            timed.offer(label, *made)
    report(timed.line())
    return timed


def _descend(
    chain: Chain, timed: Timed, form: Form, label: str, gate_ups: list[Tile], downs: list[Tile]
) -> tuple[float, ExpertsConfig] | None:
    """The best tile of one kernel beside the best of the other so far, in turns; the time of a layer with both, and them."""

    def measure(gate_up: Tile, down: Tile) -> float:
        return chain.time(partial(chain.layer, config=ExpertsConfig(form=form, gate_up=gate_up, down=down, pdl=True)))

    best = (gate_ups[0], downs[0])
    for _ in range(2):
        gate_up = _fastest("gate_up." + label, gate_ups, timed, partial(measure, down=best[1]))
        if gate_up is None:
            return None
        down = _fastest("down." + label, downs, timed, partial(measure, gate_up))
        if down is None:
            return None
        best = (gate_up, down)
    return timed.parts["down." + label], ExpertsConfig(form=form, gate_up=best[0], down=best[1], pdl=True)


def _each(layer: Layer, call: Callable[..., object]) -> list[Callable[[], object]]:
    chosen = zip(layer.x, layer.experts, layer.weights, strict=True)
    return [partial(call, x, experts, weights, layer.local, layer.gate_up, layer.down) for x, experts, weights in chosen]


def _attempt(label: str, timed: Timed, measure: Callable[[], float]) -> float | None:
    try:
        micros = measure()
        timed.candidates.append({"what": label, "us": round(micros, 2)})
    except Exception as error:  # one variant must not end the run
        timed.candidates.append({"what": label, "failed": repr(error)[:300]})
        return None
    return micros


def _fastest(name: str, tiles: list[Tile], timed: Timed, measure: Callable[[Tile], float]) -> Tile | None:
    found = [(micros, at) for at, tile in enumerate(tiles) if (micros := _attempt(f"{name} {tile}", timed, partial(measure, tile)))]
    if not found:
        return None
    micros, at = min(found)
    timed.parts[name] = micros
    return tiles[at]


def _best_grouped(layer: Layer, block_m: int, timed: Timed) -> list[tuple[str, ExpertsConfig]]:
    held, top_k = layer.model.held, layer.model.top_k
    groups = [group_pairs(experts, layer.local, held, block_m) for experts in layer.experts]
    units = torch.randn(layer.rows * top_k, layer.model.units, device="cuda", dtype=torch.bfloat16)
    pairs = torch.randn(layer.rows * top_k, layer.model.hidden, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(layer.x[0])
    chosen = list(zip(layer.x, layer.experts, layer.weights, groups, strict=True))

    def measure_gate_up(tile: Tile) -> float:
        form = gate_up_persistent if tile.persistent else gate_up_grouped
        return time_us([partial(form, x, layer.gate_up, g, top_k, tile, pdl=False) for x, _, _, g in chosen])

    def measure_down(tile: Tile) -> float:
        form = down_persistent if tile.persistent else down_grouped
        return time_us([partial(form, units, w, layer.down, g, tile, pdl=False) for _, _, w, g in chosen])

    tag = f".{block_m}"
    small: dict[str, list[Callable[[], object]]] = {
        "group": [partial(group_pairs, e, layer.local, held, block_m) for e in layer.experts],
        "combine": [partial(combine, pairs, e, layer.local, out, pdl=False) for e in layer.experts],
    }
    for name, calls in small.items():
        timed.parts[name + tag] = _attempt(name + tag, timed, partial(time_us, calls)) or float("nan")
    gate_up = _fastest("gate_up" + tag, GROUPED[block_m]["gate_up"], timed, measure_gate_up)
    down = _fastest("down" + tag, GROUPED[block_m]["down"], timed, measure_down)
    return [(f"grouped{tag}", ExpertsConfig(form="grouped", gate_up=gate_up, down=down))] if gate_up and down else []


def time_router() -> list[dict[str, Any]]:
    """Logits by cuBLAS and choice in one kernel, against all in one kernel for few rows."""
    results = []
    turn = torch.zeros(COUNTERS, dtype=torch.int32, device="cuda")
    for num_experts, top_k in ((128, 8), (256, 8), (512, 10)):
        router = torch.randn(num_experts, 2048, device="cuda", dtype=torch.bfloat16)
        for rows in (1, 2, 4, 8, 32, 128, 8192):
            x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
            logits = functional.linear(x, router)
            row: dict[str, Any] = {"experts": num_experts, "rows": rows}
            calls: dict[str, Callable[[], object]] = {
                "linear": partial(functional.linear, x, router),
                "choose": partial(route_logits, logits, top_k, True),
                "both": partial(_route_both, x, router, top_k),
            }
            if rows <= FUSED_ROWS:
                local = local_experts(num_experts, num_experts)
                calls["fused"] = partial(route_rows, x, router, top_k, True, turn)
                calls["fused+group"] = partial(route_rows, x, router, top_k, True, turn, local, num_experts, 16)
            for name, call in calls.items():
                try:
                    row[name] = round(time_us([call] * 20), 2)
                except Exception as error:  # one variant must not end the run
                    row[name] = repr(error)[:200]
            report(f"router {row}")
            results.append(row)
    return results


def _route_both(x: torch.Tensor, router: torch.Tensor, top_k: int) -> object:
    return route_logits(functional.linear(x, router), top_k, True)


def time_model(key: str, all_rows: list[int]) -> dict[str, Any]:
    """Times of one of MODELS, and the entry of a tuning table (`kernels.tuning`) that they make."""
    model = MODELS[key]
    weights = random_weights(model.held, model.hidden, model.units, torch.bfloat16)
    timed = [(time_decode if rows <= FUSED_ROWS else time_experts)(key, rows, weights) for rows in all_rows]
    for each in timed:
        report(f"  {key} T {each.rows}: {each.config}")
    shape = experts_shape(model.hidden, model.units, model.held, model.top_k, "bfloat16")
    entry = {"kernel": "experts", "shape": shape, "rows": {str(each.rows): each.config for each in timed if each.config}}
    plain = [{name: getattr(each, name) for name in Timed.__slots__} for each in timed]
    return {"device": torch.cuda.get_device_name(), "timed": plain, "entry": entry}


def report(line: str) -> None:
    """One line of the output, at once."""
    print(line, flush=True)
