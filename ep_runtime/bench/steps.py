"""From the times at which results arrived to the time of a step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SETTLE = 4
"""Intervals after the first full step that are left out: it may still have prompt rows beside it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One step's results on the host: seconds of `time.perf_counter`, sequences with tokens, the head's host seconds so far."""

    at: float
    sequences: int
    host_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Milliseconds of steady decode steps: median, mean, 90th percentile, the longest, and how many there were."""

    median: float
    mean: float
    p90: float
    longest: float
    steps: int


def steady_intervals(arrivals: Sequence[Arrival], batch: int) -> list[float]:
    """Milliseconds between results of neighbouring steps that gave all `batch` sequences a token, the first `SETTLE` left out."""
    return [1e3 * (now.at - before.at) for before, now in _steady(arrivals, batch)]


def steady_host_ms(arrivals: Sequence[Arrival], batch: int) -> float:
    """Milliseconds of host time of a step: the median over the same intervals."""
    return 1e3 * statistics.median(now.host_seconds - before.host_seconds for before, now in _steady(arrivals, batch))


def _steady(arrivals: Sequence[Arrival], batch: int) -> list[tuple[Arrival, Arrival]]:
    full = [(before, now) for before, now in pairwise(arrivals) if before.sequences == now.sequences == batch]
    return full[SETTLE:]


def summarise(intervals: Sequence[float]) -> StepTimes:
    """The statistics of `intervals` (milliseconds). Raises ValueError when there are fewer than two."""
    if len(intervals) < 2:
        raise ValueError(f"{len(intervals)} steady decode steps are too few to time; generate more tokens")
    return StepTimes(
        median=statistics.median(intervals),
        mean=statistics.fmean(intervals),
        p90=statistics.quantiles(intervals, n=10, method="inclusive")[-1],
        longest=max(intervals),
        steps=len(intervals),
    )
