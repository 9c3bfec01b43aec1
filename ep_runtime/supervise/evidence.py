"""What was seen going wrong, and which of it is the cause: one death makes every other rank report a lost link."""

from __future__ import annotations

from dataclasses import dataclass

from protocol import errors
from protocol.messages import Report

ENGINE_KILLED = "EngineKilled"
"""`Report.error` of a supervisor whose engine died by a signal that it did not send."""
ENGINE_EXITED = "EngineExited"
"""`Report.error` of a supervisor whose engine ended by itself without being told to, with whatever status."""
SUPERVISOR_GONE = "SupervisorGone"
"""A rank's connection ended: its supervisor died, its host did, or the network between."""
DEADLINE = errors.EpDeadline.__name__

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

START_REFUSALS = frozenset(
    {"ModelError", "UnsupportedModel", "CheckpointError", "MemoryPlanError", "ModelNotFound", errors.EpHandshakeRefused.__name__}
)
"""Errors that no other start can cure while no epoch has ever run. Those of `model.errors` go by name: it is not imported here."""

_UNNAMED = (ENGINE_KILLED, ENGINE_EXITED, SUPERVISOR_GONE, "")


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation. `rank` is None when the coordinator made it and it concerns several; the flags are those of `Report`."""

    rank: int | None
    error: str
    message: str
    ended: bool = False
    outside: bool = False

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{where}{self.message}" if self.error in _UNNAMED else f"{where}{self.error}: {self.message}"

    @property
    def consequence(self) -> bool:
        """True for what a rank says of the others. A deadline that the coordinator judged is its own observation."""
        return self.rank is not None and self.error in CONSEQUENCES


def from_report(rank: int, report: Report) -> Evidence:
    """A rank's report as evidence."""
    return Evidence(rank, report.error, report.message, report.ended, report.outside)


def root_cause(seen: list[Evidence]) -> Evidence:
    """The most direct observation, the earliest among equals. `seen` is in order of arrival and not empty.

    An act from outside comes first, then a death without a word, then what a rank says of itself (which explains its death), and
    last what ranks say of each other: a lost link is what the others see of all of these.
    """
    spoke = {evidence.rank for evidence in seen if not evidence.ended and not evidence.consequence}

    def directness(evidence: Evidence) -> int:
        if evidence.outside:
            return 0
        if evidence.ended:
            return 3 if evidence.rank in spoke else 1
        return 4 if evidence.consequence else 2

    return min(seen, key=directness)
