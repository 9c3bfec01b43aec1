"""Requests that have come and are not taken in yet: a turn of the head takes in a bounded number, the others wait here."""

from __future__ import annotations

import heapq

from ep_runtime.engine.port import Received, Undecodable
from protocol.messages import Abort, Mask, Submit

TAKEN_AT_ONCE = 64
"""Requests that a turn takes in at most: short against a step that the device has meanwhile."""


class Intake:
    """In the order of the scheduler's queue: by priority (lower first), then first come, first taken in.

    A request that is picked out leaves its entry in the heap, where its turn would find it gone.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._waiting: dict[int, Submit] = {}
        self._numbers: dict[str, list[int]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Submit) -> None:
        """One more, behind all others of its priority."""
        heapq.heappush(self._heap, (message.priority, self._arrivals))
        self._waiting[self._arrivals] = message
        self._numbers.setdefault(message.request_id, []).append(self._arrivals)
        self._arrivals += 1

    def take(self, rows: int | None = None) -> list[Submit]:
        """What one turn takes in. With `rows`, the room of a step, no more than fills it."""
        taken: list[Submit] = []
        while self._waiting and len(taken) < TAKEN_AT_ONCE and (rows is None or rows > 0):
            _, number = heapq.heappop(self._heap)
            if number in self._waiting:
                message = self._remove(number)
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
                return self._pick(list(self._numbers))

    def _pick(self, request_ids: list[str]) -> list[Submit]:
        numbers = {number for name in request_ids for number in self._numbers.get(name, ())}
        picked = [self._remove(number) for _, number in sorted((self._waiting[number].priority, number) for number in numbers)]
        if len(self._heap) > 2 * len(self._waiting) + TAKEN_AT_ONCE:
            self._heap = [entry for entry in self._heap if entry[1] in self._waiting]
            heapq.heapify(self._heap)
        return picked

    def _remove(self, number: int) -> Submit:
        message = self._waiting.pop(number)
        numbers = self._numbers[message.request_id]
        numbers.remove(number)
        if not numbers:
            del self._numbers[message.request_id]
        return message
