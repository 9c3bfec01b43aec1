"""Which kernels a decode step's time goes to, by torch's profiler."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch.profiler import ProfilerActivity

from ep_runtime.bench.steps import Arrival

SKIP = 8
STEPS = 16
NAME_WIDTH = 70


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

    @property
    def tokens_needed(self) -> int:
        """New tokens of a request that is long enough to be profiled."""
        return SKIP + STEPS + 8

    def arrived(self, arrival: Arrival) -> None:
        """Start or stop when it is time."""
        self._full += arrival.sequences == self._batch
        if self._full == SKIP and self._profiler is None:
            kind = ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU
            self._profiler = torch.profiler.profile(activities=[kind])
            self._profiler.start()
        elif self._full == SKIP + STEPS and not self._events:
            self._stop()

    def rows(self) -> list[dict[str, Any]]:
        """One row a kernel, most time first: microseconds and calls a step, share of all kernels' time.

        Raises RuntimeError when too few steps arrived.
        """
        if not self._events:
            raise RuntimeError(f"the profile saw {self._full} full steps, not the {SKIP + STEPS} that it needs")
        timed = [(event.key, event.count, self._microseconds(event)) for event in self._events]
        total = sum(microseconds for _, _, microseconds in timed) or 1.0
        timed.sort(key=lambda entry: -entry[2])
        return [
            {
                "us_per_step": microseconds / self.steps_seen,
                "calls_per_step": count / self.steps_seen,
                "share": f"{100 * microseconds / total:.1f}%",
                "name": name[:NAME_WIDTH],
            }
            for name, count, microseconds in timed
            if microseconds > 0
        ]

    def _stop(self) -> None:
        assert self._profiler is not None
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profiler.stop()
        self.steps_seen = STEPS
        events = self._profiler.key_averages()
        self._events = [event for event in events if not self._on_gpu or event.device_type.name == "CUDA"]

    def _microseconds(self, event: Any) -> float:
        return float(event.self_device_time_total if self._on_gpu else event.self_cpu_time_total)
