"""Requests that have come and are not taken in yet: a turn of the head takes in a bounded number, the others wait here."""

from __future__ import annotations

import heapq

from ep_runtime.engine.port import Received, Undecodable
from protocol.messages import Abort, Mask, Submit

TAKEN_AT_ONCE = 64
"""Requests that a turn takes in at most: short against a step that the device has meanwhile."""


class Intake:
    """In the order of the scheduler's queue: by priority (lower first), then first come, first taken in."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Submit]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Submit) -> None:
        """One more, behind all others of its priority."""
        heapq.heappush(self._waiting, (message.priority, self._arrivals, message))
        self._arrivals += 1

    def take(self, rows: int | None = None) -> list[Submit]:
        """What one turn takes in. With `rows`, the room of a step, no more than fills it."""
        taken: list[Submit] = []
        while self._waiting and len(taken) < TAKEN_AT_ONCE and (rows is None or rows > 0):
            *_, message = heapq.heappop(self._waiting)
            taken.append(message)
            if rows is not None:
                rows -= len(message.prompt) + len(message.generated)
        return taken

    def due_before(self, message: Received) -> list[Submit]:
        """What waits and `message` must find taken in: it may be about that, and came behind it.

        A mask answers a token, which no request has got that waits here. Requests that are given up take no others along: under
        load many are, and a turn is to take in a bounded number then, too.
        """
        match message:
            case Submit() | Mask():
                return []
            case Abort():
                return self._pick(message.request_ids)
            case Undecodable():
                return self._pick([message.request_id])
            case _:
                taken = [waiting for *_, waiting in sorted(self._waiting)]
                self._waiting.clear()
                return taken

    def _pick(self, request_ids: list[str]) -> list[Submit]:
        if not self._waiting:
            return []
        names = set(request_ids)
        picked = sorted(entry for entry in self._waiting if entry[2].request_id in names)
        if picked:
            self._waiting = [entry for entry in self._waiting if entry[2].request_id not in names]
            heapq.heapify(self._waiting)
        return [waiting for *_, waiting in picked]
