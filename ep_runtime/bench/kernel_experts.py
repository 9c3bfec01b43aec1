"""Expert kernels and the router on a GPU: checked against float64, timed over candidates, the best kept as a tuning table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from ep_runtime.bench.experts_candidates import GROUPED, PAIRED, PAIRED_UP_TO, block_rows
from ep_runtime.bench.timing import floor_us, time_us
from kernels.experts_config import ExpertsConfig, Tile, default_config, experts_shape
from kernels.experts_grouped import combine, down_grouped, gate_up_grouped
from kernels.experts_paired import down_paired, gate_up_paired
from kernels.experts_triton import moe_experts
from kernels.grouping import group_pairs
from kernels.router_triton import FUSED_ROWS, route_logits, route_rows


@dataclass(frozen=True, slots=True)
class Model:
    """One model's expert layer on one of `ranks` ranks."""

    name: str
    hidden: int
    units: int
    experts: int
    top_k: int
    ranks: int = 1

    @property
    def held(self) -> int:
        """Experts of this rank, the first ones."""
        return self.experts // self.ranks


MODELS = {
    "30b": Model("Qwen3-30B-A3B", 2048, 768, 128, 8),
    "30b-ep2": Model("Qwen3-30B-A3B", 2048, 768, 128, 8, 2),
    "35b": Model("Qwen3.5-35B-A3B", 2048, 512, 256, 8),
    "80b-ep2": Model("Qwen3-Next-80B-A3B", 2048, 512, 512, 10, 2),
}


class Layer:
    """Random weights of one layer, and different inputs and choices for each of several calls."""

    def __init__(self, model: Model, rows: int, calls: int, weights: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.model, self.rows = model, rows
        self.gate_up, self.down = weights
        self.local = local_experts(model.experts, model.held)
        self.x = [torch.randn(rows, model.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(calls)]
        if rows == 1:  # no expert twice in a row of calls, so that none is still in the cache
            logits = [-(torch.arange(model.experts, device="cuda") - call * model.top_k) % model.experts for call in range(calls)]
            if model.ranks > 1:  # half of the choices are here
                logits = [value.view(2, -1).t().flatten() for value in logits]
            chosen = [route_logits(value[None].float() * 0.01, model.top_k, True) for value in logits]
        else:
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


def local_experts(experts: int, held: int) -> torch.Tensor:
    """An expert's index on a rank that holds the first `held`, or -1."""
    local = torch.full((experts,), -1, dtype=torch.int64, device="cuda")
    local[:held] = torch.arange(held, device="cuda")
    return local


def random_weights(held: int, hidden: int, units: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and down, scaled so that outputs stay near 1."""
    gate_up = torch.empty(held, 2 * units, hidden, device="cuda", dtype=dtype).normal_(std=hidden**-0.5)
    return gate_up, torch.empty(held, hidden, units, device="cuda", dtype=dtype).normal_(std=units**-0.5)


def exact(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, local: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The sum in float64, expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    mine = local[experts.long()]
    for expert in range(gate_up.shape[0]):
        row, choice = (mine == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x[row].double(), gate_up[expert].double()).chunk(2, -1)
        product = functional.linear(functional.silu(gate) * up, down[expert].double())
        out.index_add_(0, row, product * weights[row, choice].double().unsqueeze(-1))
    return out


def error_of(out: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in the Euclidean norm; NaN where the output has one."""
    return float((out.double() - want).norm() / want.norm().clamp(min=1e-30))


def check(report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every form and flag, and the router, on random data; one row for each, with its error."""
    results = []
    shapes = [(1, 20, 20, 3, 256, 96), (2, 128, 64, 8, 2048, 768), (7, 60, 15, 4, 200, 72), (33, 64, 16, 8, 2048, 512)]
    shapes += [(65, 10, 3, 1, 72, 24), (130, 512, 512, 10, 2048, 512), (600, 16, 16, 4, 512, 256), (3000, 32, 8, 8, 1024, 768)]
    torch.manual_seed(1)
    for rows, num_experts, held, top_k, hidden, units in shapes:
        local = local_experts(num_experts, held)
        gate_up, down = random_weights(held, hidden, units, torch.bfloat16)
        x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        weights, experts = route_logits(torch.randn(rows, num_experts, device="cuda"), top_k, True)
        want = exact(x, experts, weights, local, gate_up, down)
        for label, config in _checked_configs(rows, top_k, held, hidden, units):
            poison(x)
            row: dict[str, Any] = {"rows": rows, "experts": num_experts, "held": held, "hidden": hidden, "units": units}
            try:
                first = moe_experts(x, experts, weights, local, gate_up, down, config=config)
                poison(x)
                again = moe_experts(x, experts, weights, local, gate_up, down, config=config)
                torch.cuda.synchronize()
                row |= {"what": label, "error": error_of(first, want), "same_bits": bool(torch.equal(first, again))}
            except Exception as error:  # one variant must not end the run
                row |= {"what": label, "failed": repr(error)[:500]}
            good = row.get("error", 1.0) < 1e-2 and row.get("same_bits", False)
            if not good:
                report(f"WRONG {row}")
            results.append(row | {"good": good})
    results += _check_router(report)
    report(f"checks: {sum(row['good'] for row in results)} of {len(results)} good")
    return results


def poison(x: torch.Tensor) -> None:
    """Leave NaN in the memory that the next allocations get, so that an element that is not written shows."""
    for numel in (1 << 12, 1 << 16, 1 << 20, 1 << 22, x.numel(), 1 << 24):
        torch.full((numel,), float("nan"), device=x.device)


def _checked_configs(rows: int, top_k: int, held: int, hidden: int, units: int) -> Iterator[tuple[str, ExpertsConfig]]:
    yield "default", default_config(rows, top_k, held)
    small = Tile(block_n=16, block_k=64, stages=2)
    yield "paired", ExpertsConfig(form="paired", gate_up=small, down=small)
    yield "paired pdl", ExpertsConfig(form="paired", gate_up=small, down=small, pdl=True)
    for block_m in (16, 64, 128):
        for swap in (False, True):
            for descriptors in (False, True):
                if descriptors and (hidden * 2 % 16 or units * 2 % 16):
                    continue
                tile = Tile(block_m=block_m, block_n=64, block_k=64, swap=swap, descriptors=descriptors)
                label = f"grouped m{block_m}{' swap' * swap}{' descriptors' * descriptors}"
                yield label, ExpertsConfig(form="grouped", gate_up=tile, down=tile, pdl=descriptors)


def _check_router(report: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    for rows, num_experts, top_k, normalise in [(1, 128, 8, True), (5, 60, 4, False), (8, 512, 10, True), (300, 256, 8, True)]:
        row: dict[str, Any] = {"what": "router", "rows": rows, "experts": num_experts}
        try:
            x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
            router = torch.randn(num_experts, 2048, device="cuda", dtype=torch.bfloat16)
            logits = functional.linear(x, router)
            weights, experts = route_logits(logits, top_k, normalise)
            row |= _router_errors(weights, experts, logits, top_k, normalise)
            if rows <= FUSED_ROWS:
                turn = torch.zeros(1, dtype=torch.int32, device="cuda")
                local = local_experts(num_experts, num_experts // 2)
                args = (x, router, top_k, normalise, turn, local, num_experts // 2, 16)
                for _ in range(3):
                    weights, experts, groups = route_rows(*args)
                exact_logits = functional.linear(x.double(), router.double()).bfloat16()
                fused = _router_errors(weights, experts, exact_logits, top_k, normalise)
                row["good"] = row["good"] and fused["error"] < 5e-2 and int(turn) == 0
                row["fused_error"] = fused["error"]
                again = group_pairs(experts, local, num_experts // 2, 16)
                counts = slice(0, 1 + num_experts // 2)
                row["good"] = row["good"] and groups is not None and torch.equal(groups.meta[counts], again.meta[counts])
        except Exception as error:  # one variant must not end the run
            row |= {"good": False, "failed": repr(error)[:500]}
        if not row["good"]:
            report(f"WRONG {row}")
        yield row


def _router_errors(
    weights: torch.Tensor, experts: torch.Tensor, logits: torch.Tensor, top_k: int, normalise: bool
) -> dict[str, Any]:
    """Chosen logits against torch's (ties leave the experts open), and weights against softmax in float64."""
    want = logits.float().topk(top_k).values
    chosen = logits.float().gather(1, experts.long())
    every = logits.double().softmax(-1).gather(1, experts.long())
    exact_weights = every / every.sum(-1, keepdim=True) if normalise else every
    off, error = float((chosen - want).abs().max()), error_of(weights, exact_weights)
    distinct = all(len(set(row)) == top_k for row in experts.tolist())
    return {"chosen_off": off, "error": error, "good": off == 0.0 and error < 1e-5 and distinct}


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


def time_experts(key: str, rows: int, weights: tuple[torch.Tensor, torch.Tensor], report: Callable[[str], None]) -> Timed:
    """The best tile of each kernel, then whole layers made of them, with and without programmatic launch."""
    calls = 24 if rows == 1 else 8 if rows <= 32 else 4 if rows <= 256 else 2
    layer = Layer(MODELS[key], rows, calls, weights)
    num_bytes, flops = layer.cost()
    timed = Timed(key, rows, floor_us(num_bytes, flops), num_bytes, flops)
    configs = [("default", default_config(rows, layer.model.top_k, layer.model.held))]
    if rows <= PAIRED_UP_TO:
        configs += _best_paired(layer, timed)
    for block_m in block_rows(rows, layer.model.top_k, layer.model.experts):
        configs += _best_grouped(layer, block_m, timed)
    for label, config in configs:
        for pdl in (False, True):
            whole = ExpertsConfig(form=config.form, gate_up=config.gate_up, down=config.down, pdl=pdl)
            name = label + "+pdl" * pdl
            micros = _attempt(name, timed, lambda whole=whole: time_us(_each(layer, lambda *a: moe_experts(*a, config=whole))))
            if micros is not None:
                timed.offer(name, micros, whole)
    report(timed.line())
    return timed


def _each(layer: Layer, call: Callable[..., object]) -> list[Callable[[], object]]:
    return [
        lambda a=(x, e, w): call(*a, layer.local, layer.gate_up, layer.down)  # type: ignore[misc]
        for x, e, w in zip(layer.x, layer.experts, layer.weights, strict=True)
    ]


def _attempt(label: str, timed: Timed, measure: Callable[[], float]) -> float | None:
    try:
        micros = measure()
        timed.candidates.append({"what": label, "us": round(micros, 2)})
    except Exception as error:  # one variant must not end the run
        timed.candidates.append({"what": label, "failed": repr(error)[:300]})
        return None
    return micros


def _fastest(name: str, tiles: list[Tile], timed: Timed, measure: Callable[[Tile], float]) -> Tile | None:
    found = [(micros, at) for at, tile in enumerate(tiles) if (micros := _attempt(f"{name} {tile}", timed, lambda t=tile: measure(t)))]
    if not found:
        return None
    micros, at = min(found)
    timed.parts[name] = micros
    return tiles[at]


def _best_paired(layer: Layer, timed: Timed) -> list[tuple[str, ExpertsConfig]]:
    def measure_gate_up(tile: Tile) -> float:
        return time_us(_each(layer, lambda x, e, w, local, gate_up, down: gate_up_paired(x, e, local, gate_up, tile, pdl=False)))

    units = torch.randn(layer.rows * layer.model.top_k, layer.model.units, device="cuda")
    out = torch.empty_like(layer.x[0])

    def measure_down(tile: Tile) -> float:
        return time_us(_each(layer, lambda x, e, w, local, gate_up, down: down_paired(units, e, w, local, down, out, tile, pdl=False)))

    gate_up = _fastest("gate_up.p", PAIRED["gate_up"], timed, measure_gate_up)
    down = _fastest("down.p", PAIRED["down"], timed, measure_down)
    return [("paired", ExpertsConfig(form="paired", gate_up=gate_up, down=down))] if gate_up and down else []


def _best_grouped(layer: Layer, block_m: int, timed: Timed) -> list[tuple[str, ExpertsConfig]]:
    held, top_k = layer.model.held, layer.model.top_k
    groups = [group_pairs(experts, layer.local, held, block_m) for experts in layer.experts]
    units = torch.randn(layer.rows * top_k, layer.model.units, device="cuda", dtype=torch.bfloat16)
    pairs = torch.randn(layer.rows * top_k, layer.model.hidden, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(layer.x[0])
    chosen = list(zip(layer.x, layer.experts, layer.weights, groups, strict=True))

    def measure_gate_up(tile: Tile) -> float:
        return time_us([lambda x=x, g=g: gate_up_grouped(x, layer.gate_up, g, top_k, tile, pdl=False) for x, _, _, g in chosen])

    def measure_down(tile: Tile) -> float:
        return time_us([lambda w=w, g=g: down_grouped(units, w, layer.down, g, tile, pdl=False) for _, _, w, g in chosen])

    tag = f".{block_m}"
    small = {
        "group": lambda: time_us([lambda e=e: group_pairs(e, layer.local, held, block_m) for e in layer.experts]),
        "combine": lambda: time_us([lambda e=e: combine(pairs, e, layer.local, out, pdl=False) for e in layer.experts]),
    }
    for name, measure in small.items():
        timed.parts[name + tag] = _attempt(name + tag, timed, measure) or float("nan")
    gate_up = _fastest("gate_up" + tag, GROUPED[block_m]["gate_up"], timed, measure_gate_up)
    down = _fastest("down" + tag, GROUPED[block_m]["down"], timed, measure_down)
    return [(f"grouped{tag}", ExpertsConfig(form="grouped", gate_up=gate_up, down=down))] if gate_up and down else []


def time_router(report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Logits by cuBLAS and choice in one kernel, against all in one kernel for few rows."""
    results = []
    turn = torch.zeros(1, dtype=torch.int32, device="cuda")
    for num_experts, top_k in ((128, 8), (256, 8), (512, 10)):
        router = torch.randn(num_experts, 2048, device="cuda", dtype=torch.bfloat16)
        for rows in (1, 2, 4, 8, 32, 128, 8192):
            x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
            logits = functional.linear(x, router)
            row: dict[str, Any] = {"experts": num_experts, "rows": rows}
            calls = {
                "linear": lambda x=x, r=router: functional.linear(x, r),
                "choose": lambda a=logits, k=top_k: route_logits(a, k, True),
                "both": lambda x=x, r=router, k=top_k: route_logits(functional.linear(x, r), k, True),
            }
            if rows <= FUSED_ROWS:
                local = local_experts(num_experts, num_experts)
                calls["fused"] = lambda x=x, r=router, k=top_k: route_rows(x, r, k, True, turn)
                calls["fused+group"] = lambda x=x, r=router, k=top_k, m=local: route_rows(x, r, k, True, turn, m, len(m), 16)
            for name, call in calls.items():
                try:
                    row[name] = round(time_us([call] * 20), 2)
                except Exception as error:  # one variant must not end the run
                    row[name] = repr(error)[:200]
            report(f"router {row}")
            results.append(row)
    return results


def run(models: list[str], all_rows: list[int], report: Callable[[str], None]) -> dict[str, Any]:
    """Checks, times, and `table`: the entries of a tuning table (`kernels.tuning`)."""
    began = time.monotonic()
    checks = check(report)
    report(f"{time.monotonic() - began:.0f} s")
    router = time_router(report)
    timed, entries = [], []
    for key in models:
        model = MODELS[key]
        weights = random_weights(model.held, model.hidden, model.units, torch.bfloat16)
        of_model = [time_experts(key, rows, weights, report) for rows in all_rows]
        report(f"{key} done after {time.monotonic() - began:.0f} s")
        timed += of_model
        shape = experts_shape(model.hidden, model.units, model.held, model.top_k, "bfloat16")
        rows = {str(each.rows): each.config for each in of_model if each.config}
        entries.append({"kernel": "experts", "shape": shape, "rows": rows})
        del weights
    for each in timed:
        report(each.line())
        report(f"    {each.config}")
    table = {"device": torch.cuda.get_device_name(), "entries": entries}
    plain = [{name: getattr(each, name) for name in Timed.__slots__} for each in timed]
    return {"checks": checks, "router": router, "timed": plain, "table": table}
