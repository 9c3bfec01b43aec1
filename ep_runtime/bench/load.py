"""One measured load: prompts handed over at once, and what the head did until the last token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ep_runtime.bench.load_floor import FloorModel, LoadFloor
from ep_runtime.bench.profile import profile_call
from ep_runtime.bench.session import MeasuredLLM, check_complete, greedy


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRun:
    """Seconds from the first prompt handed over to the last token, and of what.

    `host_ms` is the mean time of the head's loop for a step, outside its waits, None where the device is the processor. `arrivals`
    are seconds since the start, and how many sequences got a token.
    """

    seconds: float
    floor: LoadFloor
    preemptions: int
    host_ms: float | None
    arrivals: list[tuple[float, int]]

    def figures(self) -> dict[str, Any]:
        """What a row says of it. `floor_share` is the floor over the time: 1 is as fast as the memory allows."""
        return {
            "seconds": self.seconds,
            "floor_seconds": self.floor.seconds,
            "floor_share": self.floor.seconds / self.seconds,
            "gigabytes": self.floor.bytes / 1e9,
            "teraflops": self.floor.flops / 1e12,
            "steps": self.floor.steps,
            "step_ms": 1e3 * self.seconds / self.floor.steps,
            "preemptions": self.preemptions,
            "host_ms": self.host_ms,
            "floor": asdict(self.floor),
        }


def run_load(llm: MeasuredLLM, prompts: Sequence[list[int]], new_tokens: int, floor: FloorModel) -> LoadRun:
    """All prompts at once, greedy, each to exactly `new_tokens`. RuntimeError when a request fails."""
    llm.arrivals.clear()
    llm.watched.plans.clear()
    preempted = llm.watched.stats().preemptions
    start, host = time.perf_counter(), llm.head.host_seconds
    outputs = llm.generate(prompts, greedy(new_tokens))
    seconds, host = time.perf_counter() - start, llm.head.host_seconds - host
    check_complete(outputs, new_tokens)
    sums = floor.of_plans(llm.watched.plans)
    return LoadRun(
        seconds=seconds,
        floor=sums,
        preemptions=llm.watched.stats().preemptions - preempted,
        host_ms=1e3 * host / sums.steps if llm.device.type != "cpu" else None,
        arrivals=[(round(arrival.at - start, 6), arrival.sequences) for arrival in llm.arrivals],
    )


def profile_load(llm: MeasuredLLM, prompts: Sequence[list[int]], new_tokens: int) -> dict[str, Any]:
    """Where the time of such a load goes, in a run of its own: the profiler slows it down."""

    def call() -> int:
        llm.watched.plans.clear()
        check_complete(llm.generate(prompts, greedy(new_tokens)), new_tokens)
        return len(llm.watched.plans)

    return profile_call(call, llm.device.type)
