"""What the cost model is fed with: published configurations, kinds of machine, and steps that were measured."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ep_runtime.bench.configs import PUBLISHED, write_config
from ep_runtime.bench.cost import Case, Fitted, Links, Load, Machine, Measured, ModelCosts, rank_bytes
from ep_runtime.bench.floor import weight_bytes
from model.config import ModelConfig
from model.loader import prepare_model
from model.parallel import Parallel

MACHINES = Path(__file__).parent / "machines"

STEP_ROWS = 8192
"""Prompt rows of a step of results that do not say it."""

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
    """One measured row: the load of a model that it is of, the step as the model sees it, the bytes of its floor, and in
    milliseconds its median and its 5th percentile."""

    source: str
    bytes: int
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
                name = f"{source}, {load['model']}, {load['attention_layout']}, {load['ranks']}"
                found += [_record(name, load, row, models[load["model"]]) for row in rows]
    return found


def read_loads(results: Mapping[str, Mapping[str, Any]], models: Mapping[str, ModelCosts]) -> list[Load]:
    """The rows of `bench prefill`, `bench throughput` and of the parts of `bench scale`; models not in `models` are left out."""
    found = []
    for result in results.values():
        if result["benchmark"] == "scale":
            runs = [(part, [*part["prefill"], part["throughput"]]) for part in result["parts"] if "prefill" in part]
        else:
            runs = [(result, result["rows"])] if result["benchmark"] in ("prefill", "throughput") else []
        for about, rows in runs:
            if about["model"] in models:
                found += [_load(about, row, models[about["model"]]) for row in rows]
    return found


def read_results(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Results of benchmarks by file name without its ending."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def known_models() -> dict[str, ModelCosts]:
    """Every published configuration."""
    return {name: model_costs(name) for name in PUBLISHED}


def _load(about: Mapping[str, Any], row: Mapping[str, Any], model: ModelCosts) -> Load:
    requests, new_tokens = row.get("prompts", row.get("requests")), row.get("new_tokens", 1)
    return Load(
        model=model,
        case=Case(
            batch=min(256, requests),
            context=row["prompt_len"] + new_tokens // 2,
            per_host=about["ranks"],
            layout=about["attention_layout"],
            stay=about.get("rows_stay", False),
        ),
        requests=requests,
        prompt_len=row["prompt_len"],
        new_tokens=new_tokens,
        seconds=row["seconds"],
        step_rows=about.get("max_num_batched_tokens", STEP_ROWS),
    )


def _record(source: str, result: Mapping[str, Any], row: Mapping[str, Any], model: ModelCosts) -> Record:
    fast, *_, slow = statistics.quantiles(row["intervals_ms"], n=20, method="inclusive")
    steady = slow < SPREAD * fast
    layout, stay = result["attention_layout"], result.get("rows_stay", False)
    case = Case(batch=row["batch"], context=1, per_host=result["ranks"], layout=layout, stay=stay)
    # The positions that the row's floor was computed with, from the bytes of its keys and values.
    case = replace(case, context=int(row["bytes"]["cache"]) // rank_bytes(model, case).cache)
    time = row["step_ms"] if steady else fast
    step = Measured(model=model, case=case, milliseconds=time, bandwidth=result["bandwidth_gb_s"] * 1e9)
    return Record(source=source, bytes=sum(row["bytes"].values()), step=step, median=row["step_ms"], fast=fast, steady=steady)
