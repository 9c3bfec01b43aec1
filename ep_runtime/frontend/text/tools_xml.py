"""The XML-like syntax of Qwen3-Coder and Qwen3.5.

`<tool_call>\n<function=NAME>\n<parameter=P>\nVALUE\n</parameter>\n</function>\n</tool_call>`; values are bare text, typed by the
tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ep_runtime.frontend.text.schema_types import parameter_types, typed_value
from ep_runtime.frontend.text.tag_text import TagText
from ep_runtime.frontend.text.tool_delta import CallList, ToolCallDelta

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_PARAMETER, _END_FUNCTION = "</parameter>", "</function>"
_NAME = re.compile(r"([^<>\n]{1,256})>")
_NAME_START = re.compile(r"[^<>\n]{0,256}")


class XmlParser:
    """A stream parser. A call's name is handed out when its function tag is whole, each argument when its parameter is.

    A function that ends in anything but its own tags is closed there, and the rest is content; one cut off by the output's end
    keeps its arguments unclosed, so that nobody takes them for complete.
    """

    def __init__(self, make_id: Callable[[], str], tools: Sequence[Mapping[str, Any]]) -> None:
        self._types = parameter_types(tools)
        self._calls = CallList(make_id)
        self._text = TagText(OPEN, self._calls)
        self._step: Callable[[], bool] | None = None
        self._buffer = ""
        self._searched = 0
        self._function = ""
        self._parameter = ""
        self._seen_parameter = False

    def push(self, content: str) -> tuple[str, list[ToolCallDelta]]:
        """Takes a piece of content; returns plain content and pieces of calls."""
        self._buffer += content
        advanced = True
        while advanced and self._buffer:
            advanced = self._step() if self._step is not None else self._outside()
        return self._calls.take()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """The output has ended: an unfinished tag or parameter comes out as content."""
        if self._step == self._open_function:
            self._text.give_back(self._buffer)
        elif self._step == self._value:
            self._calls.text(f"{_PARAMETER}{self._parameter}>{self._buffer}")
        elif self._step is not None and self._buffer.strip():
            self._calls.text(self._buffer)
        self._step, self._buffer = None, ""
        self._text.finish()
        return self._calls.take()

    def _outside(self) -> bool:
        after = self._text.push(self._buffer)
        self._buffer = after or ""
        if after is not None:
            self._step = self._open_function
        return after is not None

    def _open_function(self) -> bool:
        inner = self._buffer.lstrip()
        if (name := self._tag_name(inner, _FUNCTION)) is None:
            return False
        if not name:
            self._text.give_back("")
            self._step = None
            return True
        self._buffer = inner[len(_FUNCTION) + len(name) + 1 :]
        self._function, self._seen_parameter = name, False
        self._calls.begin(name)
        self._step = self._inside_function
        return True

    def _inside_function(self) -> bool:
        inner = self._buffer.lstrip()
        if inner.startswith(_END_FUNCTION):
            self._buffer = inner[len(_END_FUNCTION) :]
            self._end_function()
            return True
        if _END_FUNCTION.startswith(inner):
            return False
        if (name := self._tag_name(inner, _PARAMETER)) is None:
            return False
        if not name:
            self._end_function()
            return True
        self._buffer = inner[len(_PARAMETER) + len(name) + 1 :]
        self._parameter, self._searched = name, 0
        self._step = self._value
        return True

    def _value(self) -> bool:
        end = self._buffer.find(_END_PARAMETER, self._searched)
        if end < 0:
            self._searched = max(0, len(self._buffer) - len(_END_PARAMETER))
            return False
        text = self._buffer[:end].removeprefix("\n").removesuffix("\n")
        self._buffer = self._buffer[end + len(_END_PARAMETER) :]
        value = typed_value(text, self._types.get(self._function, {}).get(self._parameter, frozenset()))
        lead = ", " if self._seen_parameter else "{"
        self._calls.arguments(f"{lead}{json.dumps(self._parameter, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}")
        self._seen_parameter = True
        self._step = self._inside_function
        return True

    def _end_function(self) -> None:
        self._calls.arguments("}" if self._seen_parameter else "{}")
        self._text.call_ended()
        self._step = self._end_call

    def _end_call(self) -> bool:
        """White space and the end tag are dropped; without the tag, what comes is content again."""
        inner = self._buffer.lstrip()
        if CLOSE.startswith(inner) and inner != CLOSE:
            return False
        if inner.startswith(CLOSE):
            self._buffer = inner[len(CLOSE) :]
        self._step = None
        return True

    @staticmethod
    def _tag_name(text: str, tag: str) -> str | None:
        """The name in `<tag=NAME>` at the start of `text`; None while it may still become one, empty when it cannot."""
        if not text.startswith(tag):
            return None if tag.startswith(text) else ""
        rest = text[len(tag) :]
        if match := _NAME.match(rest):
            return match[1]
        return None if (start := _NAME_START.match(rest)) and start.end() == len(rest) and len(rest) <= 256 else ""
