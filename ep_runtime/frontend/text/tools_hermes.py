"""The Hermes syntax of Qwen3 and others: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`."""

from __future__ import annotations

from collections.abc import Callable

from ep_runtime.frontend.text.call_object import CallObject, State
from ep_runtime.frontend.text.spaced_tag import SpacedTag
from ep_runtime.frontend.text.tag_text import TagText
from ep_runtime.frontend.text.tool_delta import CallList, ToolCallDelta

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser:
    """A stream parser; a call's end tag may be missing (the next text follows, or the output ends)."""

    def __init__(self, make_id: Callable[[], str], held: bool = False) -> None:
        self._calls = CallList(make_id, held)
        self._text = TagText(OPEN, self._calls)
        self._object: CallObject | None = None
        self._closing: SpacedTag | None = None

    def push(self, content: str) -> tuple[str, list[ToolCallDelta]]:
        """Takes a piece of content; returns plain content and pieces of calls."""
        rest: str | None = content
        while rest:
            if self._closing is not None:
                rest = self._close(self._closing, rest)
            elif self._object is not None:
                rest = self._body(self._object, rest)
            elif (after := self._text.push(rest)) is None:
                rest = ""
            else:
                rest, self._object = after, CallObject(self._calls)
        return self._calls.take()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """The output has ended: a call without arguments comes out as content, or as its name where calls are forced."""
        if self._object is not None and self._object.state is State.HEAD:
            self._object.cut()
            self._text.give_back(self._object.raw)
        elif self._closing is not None:
            raw = self._closing.raw
            self._calls.text("" if raw.isspace() else raw)
        self._object = self._closing = None
        self._text.finish()
        return self._calls.take()

    def _body(self, call: CallObject, text: str) -> str:
        used = call.push(text)
        if call.state is State.BAD and not call.begun:
            self._object = None
            self._text.give_back(call.raw)
        elif call.state in (State.DONE, State.BAD):
            self._object, self._closing = None, SpacedTag(CLOSE)
            self._text.call_ended()
        return text[used:]

    def _close(self, closing: SpacedTag, text: str) -> str:
        """After an object: white space and the end tag are dropped, anything else is content again."""
        rest = closing.push(text)
        if rest is None:
            return ""
        self._closing = None
        return rest
