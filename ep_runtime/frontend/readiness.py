"""When the server may call itself ready: a pure function of what was heard from the engine and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from protocol.messages import EngineStats


class Phase(Enum):
    """Where the engine is, as the frontend knows it."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    FAILED = "failed"


@dataclass(slots=True)
class RankProgress:
    """Last step of one rank and the time it last moved or was level with the head (seconds, monotonic)."""

    step: int
    fresh: float


@dataclass(slots=True)
class EngineHealth:
    """What the frontend heard of the engine. Times are monotonic seconds."""

    phase: Phase = Phase.STARTING
    reason: str = "no engine has reported yet"
    heard: float = 0.0
    ranks: list[RankProgress] = field(default_factory=list)

    def observe(self, stats: EngineStats, now: float) -> None:
        """Take a step's report. A rank behind the head that does not move keeps its old time, whatever the others do."""
        self.heard = now
        if len(self.ranks) != len(stats.ranks):
            self.ranks = [RankProgress(step, now) for step in stats.ranks]
        for rank, step in zip(self.ranks, stats.ranks, strict=True):
            if step != rank.step or step >= stats.step:
                rank.step, rank.fresh = step, now


def unready_reason(health: EngineHealth, draining: bool, now: float, bound: float) -> str | None:
    """Why the server is not ready, or None when it is. `bound` in seconds."""
    if draining:
        return "draining: the server is shutting down"
    if health.phase is not Phase.READY:
        return f"{health.phase.value}: {health.reason}"
    if now - health.heard > bound:
        return f"the engine has not reported for {now - health.heard:.1f} s"
    for index, rank in enumerate(health.ranks):
        if now - rank.fresh > bound:
            return f"rank {index} has not moved past step {rank.step} for {now - rank.fresh:.1f} s"
    return None
