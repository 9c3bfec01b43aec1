"""The piece of a tool call that a parser emits, and the bookkeeping of one output's calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call number `index` (from 0). The first has `id` and `name`; `arguments` of all pieces make the JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ToolParser(Protocol):
    """A stream parser. Its total result does not depend on how the stream is cut into pieces."""

    def push(self, content: str) -> tuple[str, list[ToolCallDelta]]:
        """Takes a piece of content; returns plain content and pieces of tool calls to emit."""

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """The output has ended: what was held back. A call that never became one comes out as content."""


class CallList:
    """Numbers the calls of one output and collects content and deltas between two `take`s.

    `held`: a grammar holds the output to calls, so what is no call is a piece of one that was cut off; it is dropped.
    """

    def __init__(self, make_id: Callable[[], str], held: bool = False) -> None:
        self.held = held
        self._make_id = make_id
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self.count = 0
        """Calls begun so far."""

    def text(self, content: str) -> None:
        """Adds plain content."""
        if content and not self.held:
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
