"""Mistral's syntax: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, where the marker is one special token."""

from __future__ import annotations

from collections.abc import Callable

from ep_runtime.frontend.text.call_object import CallObject, State
from ep_runtime.frontend.text.tag_text import TagText
from ep_runtime.frontend.text.tool_delta import CallList, ToolCallDelta

MARKER = "[TOOL_CALLS]"


class MistralParser:
    """A stream parser; the closing bracket of the list may be missing."""

    def __init__(self, make_id: Callable[[], str], held: bool = False) -> None:
        self._calls = CallList(make_id, held)
        self._text = TagText(MARKER, self._calls)
        self._object: CallObject | None = None
        self._between: list[str] | None = None
        self._in_list = False
        self._list_has_call = False

    def push(self, content: str) -> tuple[str, list[ToolCallDelta]]:
        """Takes a piece of content; returns plain content and pieces of calls."""
        rest: str | None = content
        while rest:
            if self._object is not None:
                rest = self._body(self._object, rest)
            elif self._between is not None:
                rest = self._separator(self._between, rest)
            elif (after := self._text.push(rest)) is None:
                rest = ""
            else:
                rest, self._between = after, []
                self._in_list = self._list_has_call = False
        return self._calls.take()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """The output has ended: a call without arguments comes out as content, or as its name where calls are forced."""
        if self._object is not None and self._object.state is State.HEAD:
            self._object.cut()
            self._lost(self._object.raw)
        elif self._object is None and self._between is not None:
            self._lost("")
        self._object = self._between = None
        self._text.finish()
        return self._calls.take()

    def _separator(self, between: list[str], text: str) -> str:
        """Reads the list's opening bracket, or what stands between two objects: a comma, or the closing bracket."""
        for position, char in enumerate(text):
            if self._in_list and char == "{":
                self._object = CallObject(self._calls)
                return text[position:]
            if self._list_has_call and char == "]":
                self._between = None
                self._text.call_ended()
                return text[position + 1 :]
            if char == "[" and not self._in_list:
                self._in_list = True
            elif not (char.isspace() or (char == "," and self._in_list)):
                self._lost("")
                self._between = None
                return text[position:]
            between.append(char)
        return ""

    def _body(self, call: CallObject, text: str) -> str:
        used = call.push(text)
        if call.state is State.BAD and not call.begun:
            self._lost(call.raw)
            self._object = self._between = None
        elif call.state in (State.DONE, State.BAD):
            self._object, self._between, self._list_has_call = None, [], True
            self._text.call_ended()
        return text[used:]

    def _lost(self, raw: str) -> None:
        """What was read since the marker, or since the last call, is text after all."""
        lead = "".join(self._between or ())
        if self._list_has_call:
            self._calls.text(lead + raw if (lead + raw).strip() else "")
        else:
            self._text.give_back(lead + raw)
