"""How often the frontend is started, and when it is given up. Pure, as `membership` is."""

from __future__ import annotations

from ep_runtime.supervise.events import FrontendEnded
from ep_runtime.supervise.limits import Starts


class FrontendLife:
    """One frontend after another. `due` is when the next one is to be started, None when none is."""

    def __init__(self, failed_starts: int) -> None:
        self.alive = False
        self.due: float | None = None
        self._starts = Starts(failed_starts)
        self._served = False

    def started(self) -> None:
        """A process was started."""
        self.alive, self.due = True, None

    def ended(self, event: FrontendEnded, now: float) -> str | None:
        """It ended: why there is to be no other, or None."""
        self.alive = False
        if event.ready:
            self._served = True
            self._starts.ready()
        if event.refused and not self._served:
            return f"the frontend ended: {event.how}"
        if self._starts.ended():
            return f"the frontend: {self._starts.failed} starts in a row have failed; the last: {event.how}"
        self.due = now + self._starts.pause
        return None

    def is_due(self, now: float) -> bool:
        """Whether one is to be started now."""
        return self.due is not None and now >= self.due
