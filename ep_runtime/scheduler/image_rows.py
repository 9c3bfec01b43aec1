"""The owner of the room for rows of images."""

from __future__ import annotations

from collections.abc import Iterable

from ep_runtime.scheduler.core import SchedulerError


class RowBudget:
    """How many of `total` rows of images are left for further slots."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._held = 0

    @property
    def available(self) -> int:
        """Rows that can be taken now."""
        return self._total - self._held

    def take(self, rows: int) -> None:
        """Rows for one slot; the caller has seen that they are available."""
        if not 0 < rows <= self.available:
            raise SchedulerError(f"{rows} rows of images are taken, {self.available} of {self._total} are available")
        self._held += rows

    def give(self, rows: int) -> None:
        """Rows that a slot holds no longer."""
        if not 0 <= rows <= self._held:
            raise SchedulerError(f"{rows} rows of images return, {self._held} are held")
        self._held -= rows

    def check_integrity(self, held: Iterable[int]) -> None:
        """SchedulerError unless `held`, the rows of each slot, are those that were taken."""
        total = sum(held)
        if total != self._held or total > self._total:
            raise SchedulerError(f"slots hold {total} rows of images, books say {self._held} of {self._total}")
