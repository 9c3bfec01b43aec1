"""The piece of a tool call that a parser emits, and the bookkeeping of one output's calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call number `index` (from 0). The first has `id` and `name`; `arguments` of all pieces make the JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class CallList:
    """Numbers the calls of one output and collects content and deltas between two `take`s."""

    def __init__(self, make_id: Callable[[], str]) -> None:
        self._make_id = make_id
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self.count = 0
        """Calls begun so far."""

    def text(self, content: str) -> None:
        """Adds plain content."""
        if content:
            self._content.append(content)

    def begin(self, name: str) -> None:
        """Begins the next call."""
        self._deltas.append(ToolCallDelta(self.count, self._make_id(), name))
        self.count += 1

    def arguments(self, fragment: str) -> None:
        """Adds argument text to the latest call."""
        if fragment:
            self._deltas.append(ToolCallDelta(self.count - 1, arguments=fragment))

    def take(self) -> tuple[str, list[ToolCallDelta]]:
        """What was collected since the last take: (content, deltas)."""
        content, deltas = "".join(self._content), self._deltas
        self._content, self._deltas = [], []
        return content, deltas
