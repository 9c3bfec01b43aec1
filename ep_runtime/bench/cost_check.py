"""The cost model held against measured steps, each predicted with constants that its own load has had no part in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ep_runtime.bench.cost import Fitted, Load, Machine, decode_step, fit, fit_prompts, prefill_seconds
from ep_runtime.bench.cost_models import Record

WITHIN = 0.15
"""By how much a prediction may be off."""


def refit(machine: Machine, records: Sequence[Record]) -> Fitted:
    """The constants from all steady rows."""
    return fit(machine, [record.step for record in records if record.steady])


def refit_prompts(machine: Machine, loads: Sequence[Load]) -> Machine:
    """The machine with the constants of prompts from all loads of one new token."""
    return fit_prompts(machine, [load for load in loads if load.new_tokens == 1])


def check_loads(machine: Machine, loads: Sequence[Load]) -> list[dict[str, Any]]:
    """A row for each load: measured seconds, predicted ones, and how far off they are."""
    rows = []
    for load in loads:
        predicted = prefill_seconds(machine, load.model, load.prompts, rows=load.rows, step_rows=load.step_rows)
        what = f"prefill of {load.requests} × {load.prompt_len}"
        if load.new_tokens > 1:
            predicted += load.new_tokens * decode_step(machine, load.model, load.case).total / 1e3
            what = f"{load.requests} requests, {load.prompt_len} in, {load.new_tokens} out"
        rows.append(
            {
                "model": load.model.name,
                "layout": load.case.layout,
                "ranks": load.case.world,
                "what": what,
                "measured_s": load.seconds,
                "predicted_s": predicted,
                "off": predicted / load.seconds - 1,
            }
        )
    return rows


def check(machine: Machine, records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each record: measured, predicted with all constants, and with those of the other loads, and how far off in percent.

    Where the other loads alone do not determine the constants, `others_ms` is None.
    """
    rows = []
    for record in records:
        own = decode_step(replace(machine, bandwidth=record.step.bandwidth), record.step.model, record.step.case)
        others = _without(machine, records, record.source)
        held_out = None
        if others is not None:
            elsewhere = replace(machine, bandwidth=record.step.bandwidth, fitted=others)
            held_out = decode_step(elsewhere, record.step.model, record.step.case).total
        measured = record.step.milliseconds
        rows.append(
            {
                "source": record.source,
                "model": record.step.model.name,
                "layout": record.step.case.layout,
                "ranks": record.step.case.world,
                "batch": record.step.case.batch,
                "steady": record.steady,
                "median_ms": record.median,
                "measured_ms": measured,
                "predicted_ms": own.total,
                "off": own.total / measured - 1,
                "others_ms": held_out,
                "others_off": None if held_out is None else held_out / measured - 1,
                "collectives": own.collectives / own.device,
            }
        )
    return rows


def worst(rows: Sequence[dict[str, Any]], key: str) -> float:
    """The largest error under `key` ("off" or "others_off") of the steady rows."""
    return max(abs(row[key]) for row in rows if row["steady"] and row[key] is not None)


def _without(machine: Machine, records: Sequence[Record], source: str) -> Fitted | None:
    try:
        return refit(machine, [record for record in records if record.source != source])
    except ValueError:
        return None
