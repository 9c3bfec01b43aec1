"""How long a replay takes: from the new epoch's start until every sequence that goes on in it has a new token or has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class ReplayClock:
    """`done` gets the seconds, once a replay; one that another epoch's end cuts off gives none."""

    def __init__(self, clock: Callable[[], float], done: Callable[[float], None]) -> None:
        self._clock = clock
        self._done = done
        self._started = 0.0
        self._pending: set[str] = set()

    def begin(self, request_ids: Iterable[str]) -> None:
        """These sequences go on from now; without any the replay is over at once."""
        self._started = self._clock()
        self._pending = set(request_ids)
        if not self._pending:
            self._done(0.0)

    def settle(self, request_id: str) -> None:
        """This sequence has a new token, or has ended. Ids that are not waited for do no harm."""
        if request_id in self._pending:
            self._pending.remove(request_id)
            if not self._pending:
                self._done(self._clock() - self._started)

    def cancel(self) -> None:
        """The epoch is over."""
        self._pending.clear()
