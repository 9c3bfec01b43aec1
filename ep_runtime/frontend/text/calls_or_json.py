"""An output that a grammar holds to tool calls alone or to JSON alone."""

from __future__ import annotations

from ep_runtime.frontend.text.spaced_tag import SpacedTag
from ep_runtime.frontend.text.tool_delta import ToolCallDelta, ToolParser


class CallsOrJson:
    """A stream parser; how the output begins decides for all of it.

    Strings of JSON may quote a call, so it is not searched for any; and no JSON begins like `tag`, which begins every call.
    """

    def __init__(self, calls: ToolParser, tag: str) -> None:
        self._calls = calls
        self._tag = tag
        self._opening: SpacedTag | None = SpacedTag(tag)
        self._called = False

    def push(self, content: str) -> tuple[str, list[ToolCallDelta]]:
        """Takes a piece of content; returns JSON text or pieces of calls."""
        if self._opening is not None:
            rest = self._opening.push(content)
            if rest is None:
                return "", []
            self._called = self._opening.found
            content = self._tag + rest if self._called else rest
            self._opening = None
        return self._calls.push(content) if self._called else (content, [])

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """The output has ended. What may be the start of a call is no content."""
        return self._calls.finish() if self._called else ("", [])
