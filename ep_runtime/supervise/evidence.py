"""What was seen going wrong, and which of it is the cause: one death makes every other rank report a lost link."""

from __future__ import annotations

from dataclasses import dataclass

from protocol import errors

ENGINE_KILLED = "EngineKilled"
"""`Report.error` of a supervisor whose engine died by a signal that it did not send."""
ENGINE_EXITED = "EngineExited"
"""`Report.error` of a supervisor whose engine ended by itself without being told to, with whatever status."""

CONSEQUENCES = frozenset(
    error.__name__
    for error in (
        errors.EpLinkLost,
        errors.EpPeerGone,
        errors.EpFrameCorrupt,
        errors.EpOutOfOrder,
        errors.EpDeadline,
        errors.EpEpochClosed,
    )
)
"""Errors by which a rank speaks of the others."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation. `rank` is None when it concerns no engine."""

    rank: int | None
    error: str
    message: str

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return (
            f"{where}{self.message}" if self.error in (ENGINE_KILLED, ENGINE_EXITED, "") else f"{where}{self.error}: {self.message}"
        )


def directness(evidence: Evidence) -> int:
    """How near to the cause an observation is, 0 the nearest."""
    if evidence.error == ENGINE_KILLED:
        return 0
    if evidence.error == ENGINE_EXITED:
        return 2
    return 3 if evidence.error in CONSEQUENCES else 1


def root_cause(seen: list[Evidence]) -> Evidence:
    """The most direct observation, the earliest among equals. `seen` is in order of arrival and not empty."""
    return min(seen, key=directness)
