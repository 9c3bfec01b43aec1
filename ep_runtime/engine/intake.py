"""Requests that have come and are not taken in yet: a turn of the head takes in a bounded number, the others wait here."""

from __future__ import annotations

from collections import deque

from ep_runtime.engine.port import Received, Undecodable
from protocol.messages import Abort, Mask, Submit

TAKEN_AT_ONCE = 64
"""Requests that a turn takes in at most: short against a step that the device has meanwhile."""


class Intake:
    """First come, first taken in."""

    def __init__(self) -> None:
        self._waiting: deque[Submit] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Submit) -> None:
        """One more, behind all others."""
        self._waiting.append(message)

    def take(self, rows: int | None = None) -> list[Submit]:
        """What one turn takes in. With `rows`, the room of a step, no more than fills it."""
        taken: list[Submit] = []
        while self._waiting and len(taken) < TAKEN_AT_ONCE and (rows is None or rows > 0):
            message = self._waiting.popleft()
            taken.append(message)
            if rows is not None:
                rows -= len(message.prompt) + len(message.generated)
        return taken

    def due_before(self, message: Received) -> list[Submit]:
        """All that waits, if `message` must find it taken in: it may be about a request that waits here, and came behind it.

        A mask answers a token, which no request has got that waits here.
        """
        match message:
            case Submit() | Mask():
                return []
            case Abort():
                concerned = self._holds(message.request_ids)
            case Undecodable():
                concerned = self._holds([message.request_id])
            case _:
                concerned = True
        taken: list[Submit] = []
        if concerned:
            taken += self._waiting
            self._waiting.clear()
        return taken

    def _holds(self, request_ids: list[str]) -> bool:
        return bool(self._waiting) and not {message.request_id for message in self._waiting}.isdisjoint(request_ids)
