"""How the server ends: what it waits for, until when, and with which status. Pure, as `membership` is."""

from __future__ import annotations

from ep_runtime.supervise.events import Finish
from ep_runtime.supervise.evidence import Evidence

STOPPING_SECONDS = 8.0
"""What every member gets to be gone; longer than its own tiers take."""
FRONTEND_KILL_SECONDS = 2.0
"""What the frontend gets beyond its drain time before it is killed."""


class Ending:
    """`draining`: the frontend finishes what runs, while failures are recovered as always. `cause`: why the status will be 1."""

    def __init__(self) -> None:
        self.draining = False
        self.cause = ""
        self._orderly = False
        self._by = 0.0

    def drain(self, now: float, seconds: float) -> float:
        """Begin to drain; what the frontend gets, in seconds, before it is killed."""
        self.draining = True
        grace = seconds + FRONTEND_KILL_SECONDS
        self._by = now + grace + FRONTEND_KILL_SECONDS
        return grace

    def stop(self, now: float, running: bool) -> bool:
        """The engines are stopped; True when they run an epoch that nothing is wrong with, and so have something to finish."""
        self._orderly = running and not self.cause
        self._by = now + STOPPING_SECONDS
        return self._orderly

    def passed(self, now: float) -> bool:
        """The time for what was begun last is over."""
        return now >= self._by

    def last_words(self, evidence: Evidence) -> None:
        """A failure while everything stops: it counts when all were well before, unless another's leaving or a signal is the cause.

        Who ends a server may well send its signal to every process of it.
        """
        if self._orderly and not evidence.consequence and not evidence.outside:
            self.cause = self.cause or str(evidence)

    def give_up(self, late: list[str]) -> Finish:
        """Some have not ended in time."""
        self.cause = self.cause or f"not ended after {STOPPING_SECONDS:g} s: {', '.join(late)}"
        return self.finish()

    def finish(self) -> Finish:
        """It is over."""
        return Finish(1, self.cause) if self.cause else Finish(0)
