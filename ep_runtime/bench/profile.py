"""Which kernels the time of steps goes to, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch.profiler import ProfilerActivity

from ep_runtime.bench import report
from ep_runtime.bench.steps import Arrival

SKIP = 8
STEPS = 16
TOKENS_NEEDED = SKIP + STEPS + 8
"""Of sequences that decode together: a prompt's own token, the steps, and some that have fewer sequences."""
NAME_WIDTH = 70
SHOWN = 20


class StepProfile:
    """Profiles `STEPS` full decode steps after `SKIP` of them, told of each step's arrival."""

    COLUMNS: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"us_per_step": "us/step", "calls_per_step": "calls/step", "share": "share", "name": "kernel"}
    )

    def __init__(self, device: str, batch: int) -> None:
        self.steps_seen = 0
        self._on_gpu = device == "cuda"
        self._batch = batch
        self._full = 0
        self._profiler: torch.profiler.profile | None = None
        self._events: list[Any] = []

    def arrived(self, arrival: Arrival) -> None:
        """Start or stop when it is time."""
        self._full += arrival.sequences == self._batch
        if self._full == SKIP and self._profiler is None:
            self._profiler = _profiler(self._on_gpu)
            self._profiler.start()
        elif self._full == SKIP + STEPS and not self._events:
            self._stop()

    def rows(self) -> list[dict[str, Any]]:
        """One row a kernel, most time first: microseconds and calls a step, share of all kernels' time.

        Raises RuntimeError when too few steps arrived.
        """
        if not self._events:
            raise RuntimeError(f"the profile saw {self._full} full steps, not the {SKIP + STEPS} that it needs")
        return kernel_rows(self._events, self.steps_seen, self._on_gpu)

    def _stop(self) -> None:
        assert self._profiler is not None
        self.steps_seen = STEPS
        self._events = _stopped(self._profiler, self._on_gpu)


def profile_call(call: Callable[[], int], device: str) -> dict[str, Any]:
    """Where the time of a call goes that makes as many steps as it returns: rows as those of a `StepProfile`, and their table."""
    on_gpu = device == "cuda"
    profiler = _profiler(on_gpu)
    profiler.start()
    steps = call()
    rows = kernel_rows(_stopped(profiler, on_gpu), steps, on_gpu)
    title = f"time of {steps} steps by kernel"
    return {"title": title, "rows": rows, "table": report.table(rows[:SHOWN], StepProfile.COLUMNS)}


def kernel_rows(events: Sequence[Any], steps: int, on_gpu: bool) -> list[dict[str, Any]]:
    """One row a kernel, most time first: microseconds and calls a step, share of all kernels' time."""
    timed = [(event.key, event.count, _microseconds(event, on_gpu)) for event in events]
    total = sum(microseconds for _, _, microseconds in timed) or 1.0
    timed.sort(key=lambda entry: -entry[2])
    return [
        {
            "us_per_step": microseconds / steps,
            "calls_per_step": count / steps,
            "share": f"{100 * microseconds / total:.1f}%",
            "name": name[:NAME_WIDTH],
        }
        for name, count, microseconds in timed
        if microseconds > 0
    ]


def _profiler(on_gpu: bool) -> torch.profiler.profile:
    return torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])


def _stopped(profiler: torch.profiler.profile, on_gpu: bool) -> list[Any]:
    if on_gpu:
        torch.cuda.synchronize()
    profiler.stop()
    return [event for event in profiler.key_averages() if not on_gpu or event.device_type.name == "CUDA"]


def _microseconds(event: Any, on_gpu: bool) -> float:
    return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)
