"""The phases that lead to an epoch, and what is known of the current one, or of the last: what was seen of its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ep_runtime.supervise.evidence import Evidence, root_cause
from protocol.messages import EpochEnded


class Phase(Enum):
    """Where the server is."""

    GATHERING = "gathering"
    OPENING = "opening the epoch"
    FORMING = "handshake"
    RUNNING = "running"
    STOPPING = "stopping"


LIVE = (Phase.OPENING, Phase.FORMING, Phase.RUNNING)
"""Phases in which there is an epoch to end."""


@dataclass(slots=True)
class EpochRecord:
    """One epoch. `undecided`: it has ended, and its cause is not known yet."""

    number: int
    begun: bool = False
    """Its ranks were told to begin it; before that no request can have been in it."""
    ran: bool = False
    undecided: bool = False
    alone: str = ""
    evidence: list[Evidence] = field(default_factory=list)
    unready: set[int] = field(default_factory=set)
    """Ranks that have begun it and are not ready; read in sorted order only."""

    def note_alone(self, request_id: str) -> None:
        """A rank's page says which request ran alone; only the head's does."""
        self.alone = self.alone or request_id

    def at_once(self) -> EpochEnded:
        """What the frontend is told at the first evidence, which may be no more than a consequence."""
        return EpochEnded(epoch=self.number, reason=str(self.evidence[0]), final=False)

    def decide(self) -> tuple[Evidence, EpochEnded]:
        """All that can be seen has been: the cause, and what the frontend is told now."""
        self.undecided = False
        cause = root_cause(self.evidence)
        suspicious = self.begun and not cause.outside
        alone = self.alone if suspicious else ""
        return cause, EpochEnded(epoch=self.number, reason=str(cause), final=False, suspicious=suspicious, alone=alone)
