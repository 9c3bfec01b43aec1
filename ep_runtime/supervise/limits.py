"""How long things may take that no setting says, and how often something may fail before the server gives up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ep_runtime.supervise.backoff import start_pause

LEAVE_SECONDS = 2.0
"""What an engine gets to leave an epoch before it is killed."""
DROP_SECONDS = 5.0
"""What a supervisor gets to kill its engine before it is given up."""
STOP_GRACE_SECONDS = 3.0
"""What engines get to leave after SHUTDOWN before SIGTERM; their supervisors have a tier after it."""
WINDOW_SECONDS = 3600.0
"""Recoveries are counted over this time."""


@dataclass(slots=True)
class Starts:
    """Starts of one thing (a rank's engine, the frontend, an epoch) that failed in a row: it ended before it was ready."""

    limit: int
    failed: int = 0
    _ready: bool = False

    def ready(self) -> None:
        """This start has succeeded; the end that follows one day is not a failed start."""
        self.failed, self._ready = 0, True

    def ended(self) -> bool:
        """It ended; True when it has now failed to start `limit` times in a row."""
        if self._ready:
            self._ready = False
            return False
        self.failed += 1
        return self.failed >= self.limit

    @property
    def pause(self) -> float:
        """Seconds until the next start."""
        return start_pause(self.failed)


@dataclass(slots=True)
class Recoveries:
    """Epochs that failed within the last hour."""

    limit: int
    _times: deque[float] = field(default_factory=deque)

    def note(self, now: float) -> bool:
        """One more at `now` (seconds on any clock that does not go back); True when that is more than `limit`."""
        self._times.append(now)
        while now - self._times[0] >= WINDOW_SECONDS:
            self._times.popleft()
        return len(self._times) > self.limit
