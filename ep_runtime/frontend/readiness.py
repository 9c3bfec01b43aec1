"""When the server may call itself ready: a pure function of what was heard from the engine and when.

Only a rank's own steps count. The head sends a command at least once a second, so a rank that acknowledges none for longer than a
command may take is stuck, whatever else arrives; a long prefill is one command, and is well within that time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Phase(Enum):
    """Where the engine is, as the frontend knows it."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    FAILED = "failed"


@dataclass(slots=True)
class RankProgress:
    """The last step that a rank acknowledged, -1 before its first, and when it did (seconds, monotonic)."""

    step: int
    moved: float


@dataclass(slots=True)
class EngineHealth:
    """What the frontend heard of the engine. `ranks` are those of the running epoch."""

    phase: Phase = Phase.STARTING
    reason: str = "no engine has reported yet"
    ranks: list[RankProgress] = field(default_factory=list)

    @classmethod
    def running(cls, world: int, now: float) -> EngineHealth:
        """An epoch of `world` ranks has begun."""
        return cls(Phase.READY, "", [RankProgress(-1, now) for _ in range(world)])

    def observe(self, steps: list[int], now: float) -> None:
        """Take the last step of each rank. Only one that is higher than before is progress; a rank left out makes none."""
        for rank, step in zip(self.ranks, steps, strict=False):
            if step > rank.step:
                rank.step, rank.moved = step, now


def unready_reason(health: EngineHealth, draining: bool, now: float, bound: float) -> str | None:
    """Why the server is not ready, or None when it is. `bound` in seconds."""
    if draining:
        return "draining: the server is shutting down"
    if health.phase is not Phase.READY:
        return f"{health.phase.value}: {health.reason}"
    stuck = [index for index, rank in enumerate(health.ranks) if now - rank.moved > bound]
    if not stuck:
        return None
    first = min(stuck, key=lambda index: health.ranks[index].moved)
    rank = health.ranks[first]
    what = f"rank {first} has not" if len(stuck) < len(health.ranks) else "no rank has"
    return f"{what} moved past step {rank.step} for {now - rank.moved:.1f} s"
