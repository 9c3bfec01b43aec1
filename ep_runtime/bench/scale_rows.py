"""The tables of `bench scale`, from the parts of its result: pure functions of plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DECODE = {
    "model": "model",
    "layout": "layout",
    "ranks": "ranks",
    "batch": "batch",
    "step_ms": "ms/step",
    "floor_ms": "floor ms",
    "tokens_per_s": "tokens/s",
    "host_ms": "host ms",
    "efficiency": "efficiency",
    "collectives_share": "collectives",
    "rows_max_over_mean": "rows max/mean",
    "experts_max_over_mean": "experts max/mean",
}
OTHERS = {
    "model": "model",
    "layout": "layout",
    "ranks": "ranks",
    "start_seconds": "start s",
    "prefill": "prefill tokens/s",
    "seconds": "requests s",
    "new_tokens_per_s": "out tokens/s",
    "note": "",
}


def decode_rows(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The table of decode steps. Efficiency: tokens per second and rank, over those of the fewest ranks that were measured."""
    rows = []
    for part in parts:
        uneven = {row["batch"]: row for row in part.get("imbalance", [])}
        for row in part.get("decode", []):
            base = _fewest(parts, part, row["batch"])
            efficiency = row["tokens_per_s"] / part["ranks"] / base
            rows.append({**_name(part), **row, **uneven.get(row["batch"], {}), "efficiency": efficiency})
    return rows


def other_rows(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The table of everything else, with what was not measured and why."""
    rows = []
    for part in parts:
        row = {**_name(part), "note": part.get("skipped") or part.get("failed", "")[:60]}
        if "decode" in part:
            row |= {"start_seconds": part["start_seconds"], **part["throughput"]}
            row["prefill"] = ", ".join(
                f"{each['prompts']} x {each['prompt_len']}: {each['tokens_per_s']:,.0f}" for each in part["prefill"]
            )
        rows.append(row)
    return rows


def _fewest(parts: Sequence[Mapping[str, Any]], part: Mapping[str, Any], batch: int) -> float:
    """Tokens per second and rank of the same with the fewest ranks."""
    same = [other for other in parts if key(other)[:2] == key(part)[:2] and "decode" in other]
    first = min(same, key=lambda other: other["ranks"])
    rate = next(row["tokens_per_s"] for row in first["decode"] if row["batch"] == batch)
    return float(rate / first["ranks"])


def key(part: Mapping[str, Any]) -> tuple[str, str, int]:
    """What tells a part from all others: model, layout, ranks."""
    return part["model"], part["layout"], part["ranks"]


def _name(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part[name] for name in ("model", "layout", "ranks")}
