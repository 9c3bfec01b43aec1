"""The cost model held against measured steps, each predicted with constants that its own file has had no part in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ep_runtime.bench.cost import Fitted, Machine, decode_step, fit
from ep_runtime.bench.cost_models import Record

WITHIN = 0.15
"""By how much a prediction may be off."""


def refit(machine: Machine, records: Sequence[Record]) -> Fitted:
    """The constants from all steady rows."""
    return fit(machine, [record.step for record in records if record.steady])


def check(machine: Machine, records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each record: measured, predicted with all constants, and with those of the other files, and how far off in percent.

    Where the other files alone do not determine the constants, `others_ms` is None.
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
