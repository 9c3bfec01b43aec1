"""Whether a process's memory, descriptors and threads stayed what they were: pure functions of its samples.

A third of a process's life warms it up (allocators, caches, connections). After it, the fitted line may rise by
`max(8 MiB, 3 %)` of memory over the whole rest, and no sample may pass the beginning of the rest by `max(32 MiB, 10 %)`. The
line is Theil and Sen's (the median of all pairs' slopes), which a few high samples do not move. Descriptors and threads may end
2 higher than they began, and be 24 higher in between: clients have connections.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.soak.sample import Series

MIB = 1 << 20
GROWTH_BYTES, GROWTH_PART = 8 * MIB, 0.03
PEAK_BYTES, PEAK_PART = 32 * MIB, 0.10
COUNT_GROWTH, COUNT_PEAK = 2, 24
LEAST_SAMPLES = 20
"""After the warm-up; a process that lived shorter is not judged."""
_POINTS = 120
"""The line is fitted to at most so many medians of neighbouring samples."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """One process. Memory in bytes; `grown` is what the fitted line rises over that time. `faults` is empty when all is flat."""

    role: str
    pid: int
    seconds: float
    start: float
    end: float
    peak: float
    grown: float
    files: tuple[int, int, int]
    threads: tuple[int, int, int]
    faults: tuple[str, ...]


def thin(values: Sequence[float], most: int = _POINTS) -> list[float]:
    """Medians of `most` runs of neighbours, or the values themselves where there are not as many."""
    if len(values) <= most:
        return list(values)
    edges = [index * len(values) // most for index in range(most + 1)]
    return [statistics.median(values[start:end]) for start, end in pairwise(edges)]


def slope(seconds: Sequence[float], values: Sequence[float]) -> float:
    """Theil and Sen's slope: the median over all pairs of points."""
    pairs = [
        (values[right] - values[left]) / (seconds[right] - seconds[left])
        for left in range(len(values))
        for right in range(left + 1, len(values))
        if seconds[right] > seconds[left]
    ]
    return statistics.median(pairs)


def _ends(values: Sequence[int]) -> tuple[int, int, int]:
    """Medians of the first and last fifth, and the maximum."""
    part = max(1, len(values) // 5)
    return int(statistics.median(values[:part])), int(statistics.median(values[-part:])), max(values)


def judge(series: Series) -> Judgement | None:
    """What became of one process after its warm-up; None when it did not live long enough to say."""
    warm = len(series.seconds) // 3
    seconds, memory = series.seconds[warm:], series.memory[warm:]
    if len(seconds) < LEAST_SAMPLES:
        return None
    start, end, peak = _ends(memory)
    lasted = seconds[-1] - seconds[0]
    grown = slope(thin(seconds), thin(memory)) * lasted
    files, threads = _ends(series.files[warm:]), _ends(series.threads[warm:])
    faults = []
    if grown > max(GROWTH_BYTES, GROWTH_PART * start):
        faults.append(f"memory rises by {grown / MIB:.1f} MiB in {lasted:.0f} s")
    if peak - start > max(PEAK_BYTES, PEAK_PART * start):
        faults.append(f"memory has a peak {(peak - start) / MIB:.1f} MiB above its beginning")
    for name, (first, last, most) in (("descriptors", files), ("threads", threads)):
        if last - first > COUNT_GROWTH or most - first > COUNT_PEAK:
            faults.append(f"{name}: {first} at first, {last} at last, at most {most}")
    return Judgement(series.role, series.pid, lasted, start, end, peak, grown, files, threads, tuple(faults))


def judge_generations(judged: Sequence[Judgement]) -> list[str]:
    """Processes that took the place of killed ones must need no more than the first of their role."""
    faults = []
    for role in dict.fromkeys(one.role for one in judged):
        first, *others = [one for one in judged if one.role == role]
        for other in others:
            if other.end - first.end > max(PEAK_BYTES, PEAK_PART * first.end):
                faults.append(
                    f"{role}: {other.end / MIB:.0f} MiB in process {other.pid}, {first.end / MIB:.0f} MiB in the first one"
                )
    return faults


def table(judged: Sequence[Judgement]) -> str:
    """For people."""
    lines = [f"{'process':<14}{'pid':>8}{'seconds':>9}{'MiB start':>11}{'end':>8}{'peak':>8}{'growth':>8}  files        threads"]
    for one in judged:
        sizes = "".join(f"{value / MIB:8.1f}" for value in (one.end, one.peak, one.grown))
        counts = "  ".join(f"{a:>3}{b:>4}{c:>4}" for a, b, c in (one.files, one.threads))
        lines.append(f"{one.role:<14}{one.pid:>8}{one.seconds:>9.0f}{one.start / MIB:>11.1f}{sizes}  {counts}")
        lines += [f"    FAULT: {fault}" for fault in one.faults]
    return "\n".join(lines)
