"""What the cost model is fed with: published configurations, kinds of machine, and steps that were measured."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ep_runtime.bench.configs import PUBLISHED, write_config
from ep_runtime.bench.cost import Case, Fitted, Links, Machine, Measured, ModelCosts
from ep_runtime.bench.floor import weight_bytes
from model.config import ModelConfig
from model.loader import prepare_model
from model.parallel import Parallel
from model.state.sizes import DTYPE_BYTES

MACHINES = Path(__file__).parent / "machines"

SPREAD = 1.5
"""A row whose slow steps (95th percentile) take so many times its fast ones (5th) has no one time of a step."""


def model_costs(name: str, dtype: str = "bfloat16") -> ModelCosts:
    """Of a published configuration by name (`bench.configs`)."""
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        write_config(name, Path(temporary))
        prepared = prepare_model(Path(temporary), Parallel(0, 1), dtype=getattr(torch, dtype), device="cpu", load_format="dummy")
    config = prepared.config
    if not isinstance(config, ModelConfig):
        raise ValueError(f"{name} is no model of layers that are all run once")
    parts = weight_bytes(config, prepared.parallel, prepared.placement, prepared.weight_bytes, dtype)
    return ModelCosts(name=name, config=config, spec=prepared.spec, dtype=dtype, expert=parts.expert, dense=parts.dense)


def load_machine(name: str, folder: Path = MACHINES) -> Machine:
    """Of `machines/NAME.json`. Raises TypeError for a field that does not exist."""
    plain = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return Machine(**plain | {"fitted": Fitted(**plain["fitted"]), "links": Links(**plain["links"])})


def save_machine(machine: Machine, path: Path) -> None:
    """As JSON, fitted constants to a hundredth of a microsecond."""
    plain = asdict(machine)
    plain["fitted"] = {name: round(value, 2) for name, value in plain["fitted"].items()}
    path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One measured row: its file, the step as the model sees it, and in milliseconds its median and its 5th percentile."""

    source: str
    step: Measured
    median: float
    fast: float
    steady: bool


def read_records(results: Mapping[str, Mapping[str, Any]], models: Mapping[str, ModelCosts]) -> list[Record]:
    """The rows of `bench decode` and `bench scale` results by file name, in the order given; models not in `models` are left out.

    A row that is not steady has its 5th percentile as its time.
    """
    found = []
    for source, result in results.items():
        loads = {"decode": [result], "scale": result.get("parts", [])}.get(result["benchmark"], [])
        for load in loads:
            if load["model"] in models:
                rows = load.get("rows") or load.get("decode", [])
                found += [_record(source, load, row, models[load["model"]]) for row in rows]
    return found


def read_results(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Results of benchmarks by file name without its ending."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def known_models() -> dict[str, ModelCosts]:
    """Every published configuration."""
    return {name: model_costs(name) for name in PUBLISHED}


def _record(source: str, result: Mapping[str, Any], row: Mapping[str, Any], model: ModelCosts) -> Record:
    fast, *_, slow = statistics.quantiles(row["intervals_ms"], n=20, method="inclusive")
    steady = slow < SPREAD * fast
    case = Case(batch=row["batch"], context=_context(row, model), per_host=result["ranks"], layout=result["attention_layout"])
    time = row["step_ms"] if steady else fast
    step = Measured(model=model, case=case, milliseconds=time, bandwidth=result["bandwidth_gb_s"] * 1e9)
    return Record(source=source, step=step, median=row["step_ms"], fast=fast, steady=steady)


def _context(row: Mapping[str, Any], model: ModelCosts) -> int:
    """The positions of a sequence that the row's floor was computed with, from the bytes of its keys and values."""
    per_position = sum(cache.block_elements(1) for cache in model.spec.caches) * DTYPE_BYTES[model.dtype]
    return int(row["bytes"]["cache"]) // (per_position * row["batch"])
