"""How long a loop's thread is busy: wall time outside its waits."""

from __future__ import annotations

from time import monotonic


class BusyTime:
    """Seconds since it was made, less those of the waits that it was told of."""

    def __init__(self) -> None:
        self._began = monotonic()
        self._waited = 0.0

    def waited(self, since: float) -> None:
        """A wait has ended that began at `since`, in `time.monotonic()` seconds."""
        self._waited += monotonic() - since

    @property
    def seconds(self) -> float:
        """Busy seconds so far. Between two moments without a wait it moves with the clock."""
        return monotonic() - self._began - self._waited
