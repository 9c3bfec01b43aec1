"""The cost model held against what one rank of several was measured to take alone (`bench share`): all but the collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ep_runtime.bench.cost import Case, Load, Machine, ModelCosts, decode_step, prefill_seconds

MACHINE = "nvidia_h200"
"""Whose constants the model has (`machines/`)."""


def check_shares(machine: Machine, models: Mapping[str, ModelCosts], result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each step of a result of `bench share`: measured, and for models and devices that are known predicted milliseconds.

    The prediction has the experts that were hit, where the model's own tables have those of the busier rank.
    """
    rows = []
    for part in result["parts"]:
        for step in [*part["decode"], part["prompts"]]:
            row = {
                "model": part["model"],
                "layout": part["attention_layout"],
                "ranks": part["ranks"],
                "what": f"decode {step['batch']}" if "batch" in step else f"prompts {step['rows']}",
                "measured_ms": step["step_ms"],
                "floor_ms": step.get("floor_ms"),
            }
            if part["model"] in models and part["device"] == machine.device:
                own = replace(machine, bandwidth=part["bandwidth_gb_s"] * 1e9)
                predicted = predict(own, models[part["model"]], part, step)
                row |= {"predicted_ms": predicted, "off": predicted / step["step_ms"] - 1}
            rows.append(row)
    return rows


def predict(machine: Machine, model: ModelCosts, part: Mapping[str, Any], step: Mapping[str, Any]) -> float:
    """Milliseconds of a step without its collectives."""
    if "batch" not in step:
        load = _load(model, part, step)
        return 1e3 * prefill_seconds(machine, model, load.prompts, rows=load.rows, step_rows=load.rows)
    case = Case(batch=step["batch"], context=step["context"], hits=step["hits"], **_place(part))
    return decode_step(machine, model, case).total


def share_loads(models: Mapping[str, ModelCosts], result: Mapping[str, Any]) -> list[Load]:
    """The steps of prompts, as loads of ranks that are alone."""
    return [_load(models[part["model"]], part, part["prompts"]) for part in result["parts"] if part["model"] in models]


def _load(model: ModelCosts, part: Mapping[str, Any], step: Mapping[str, Any]) -> Load:
    length = step["prompt_len"]
    count = step["rows"] // length
    case = Case(batch=count, context=length, **_place(part))
    seconds = step["step_ms"] / 1e3
    return Load(model=model, case=case, requests=count, prompt_len=length, new_tokens=1, seconds=seconds, step_rows=step["rows"])


def _place(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"per_host": part["ranks"], "layout": part["attention_layout"], "alone": True}
