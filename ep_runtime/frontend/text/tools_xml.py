"""The XML-like syntax of Qwen3-Coder and Qwen3.5.

`<tool_call>\n<function=NAME>\n<parameter=P>\nVALUE\n</parameter>\n</function>\n</tool_call>`; values are bare text, typed by the
tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ep_runtime.frontend.text.reasoning import partial_suffix
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
    keeps its arguments unclosed, so that nobody takes them for complete. Work per character does not grow with what is held back:
    white space before a tag and a parameter's value are kept in pieces, and only what may be a tag's start is looked at again.
    """

    def __init__(self, make_id: Callable[[], str], tools: Sequence[Mapping[str, Any]], held: bool = False) -> None:
        self._types = parameter_types(tools)
        self._calls = CallList(make_id, held)
        self._text = TagText(OPEN, self._calls)
        self._step: Callable[[], bool] | None = None
        self._buffer = ""
        self._read: list[str] = []  # of the text before the buffer: white space before a tag, or a value
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
        """The output has ended: an unfinished tag or parameter comes out as content, or not at all where calls are forced."""
        if self._step == self._open_function:
            self._text.give_back(self._taken())
        elif self._step == self._value:
            self._calls.text(f"{_PARAMETER}{self._parameter}>{self._taken()}")
        elif self._step is not None and self._buffer:
            self._calls.text(self._taken())
        self._step, self._buffer = None, ""
        self._text.finish()
        return self._calls.take()

    def _outside(self) -> bool:
        after = self._text.push(self._buffer)
        self._buffer = after or ""
        if after is not None:
            self._step = self._open_function
        return after is not None

    def _skip_space(self) -> str:
        """The buffer without its leading white space, which is kept for the case that no tag follows."""
        inner = self._buffer.lstrip()
        self._read.append(self._buffer[: len(self._buffer) - len(inner)])
        self._buffer = inner
        return inner

    def _taken(self) -> str:
        """All that was taken since the last tag."""
        read, self._read = "".join(self._read), []
        return read + self._buffer

    def _open_function(self) -> bool:
        if (name := self._tag_name(self._skip_space(), _FUNCTION)) is None:
            return False
        if not name:
            self._text.give_back("")
            self._no_tag()
            return True
        self._pass_tag(len(_FUNCTION) + len(name) + 1)
        self._function, self._seen_parameter = name, False
        self._calls.begin(name)
        self._step = self._inside_function
        return True

    def _pass_tag(self, length: int) -> None:
        """A tag has come: it is dropped, and so is the white space before it."""
        self._buffer, self._read = self._buffer[length:], []

    def _no_tag(self) -> None:
        """Something else has come: it is content again, with the white space before it."""
        self._buffer, self._step = self._taken(), None

    def _inside_function(self) -> bool:
        inner = self._skip_space()
        if inner.startswith(_END_FUNCTION):
            self._pass_tag(len(_END_FUNCTION))
            self._end_function()
            return True
        if _END_FUNCTION.startswith(inner):
            return False
        if (name := self._tag_name(inner, _PARAMETER)) is None:
            return False
        if not name:
            self._end_function()
            return True
        self._pass_tag(len(_PARAMETER) + len(name) + 1)
        self._parameter = name
        self._step = self._value
        return True

    def _value(self) -> bool:
        end = self._buffer.find(_END_PARAMETER)
        keep = end if end >= 0 else len(self._buffer) - partial_suffix(self._buffer, _END_PARAMETER)
        self._read.append(self._buffer[:keep])
        self._buffer = self._buffer[keep:]
        if end < 0:
            return False
        text = "".join(self._read).removeprefix("\n").removesuffix("\n")
        self._pass_tag(len(_END_PARAMETER))
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
        inner = self._skip_space()
        if CLOSE.startswith(inner) and inner != CLOSE:
            return False
        if inner.startswith(CLOSE):
            self._pass_tag(len(CLOSE))
        self._no_tag()
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
