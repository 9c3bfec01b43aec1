"""Reads one `{"name": ..., "arguments": {...}}` object from a stream, handing out the arguments while they come."""

from __future__ import annotations

import json
import re
from enum import Enum

from ep_runtime.frontend.text.tool_delta import CallList

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")')
MAX_HEAD = 1024
"""A name and the start of the arguments come within so many characters, or the call is handed out when it is whole."""

_PAIRS = {"}": "{", "]": "["}


class State(Enum):
    """Where a CallObject is: before the arguments, in them, after them, at the object's end, or at something that is no call."""

    HEAD = 0
    ARGUMENTS = 1
    TAIL = 2
    DONE = 3
    BAD = 4


class CallObject:
    """The usual order (name first, then the arguments object) is handed out as it comes; any other order when the object is whole.

    Brackets and strings are tracked, no more: argument text is passed on as the model wrote it. BAD can be reached before the
    call's name was handed out (then `raw` holds everything) or by a wrong bracket later.
    """

    def __init__(self, calls: CallList) -> None:
        self._calls = calls
        self._stack: list[str] = []
        self._in_string = False
        self._escaped = False
        self._head: list[str] = []
        self.state = State.HEAD
        self.begun = False
        """True once the call's name was handed out."""

    @property
    def raw(self) -> str:
        """The text consumed before the call began to be handed out."""
        return "".join(self._head)

    def push(self, text: str) -> int:
        """Consumes `text` up to the object's end; returns how many characters were taken. A character that is no part is left."""
        start = 0
        for position, char in enumerate(text):
            before = self.state
            if not self._scan(char):
                self._emit(before, text[start:position])
                self.state = State.BAD
                return position
            if before is State.HEAD:
                self._head.append(char)
                if char == "{" and len(self._stack) == 2 and not self._in_string and len(self._head) <= MAX_HEAD:
                    self._try_begin()
                elif not self._stack and char == "}":
                    self._whole()
                start = position + (0 if self.state is State.ARGUMENTS else 1)
            elif before is State.ARGUMENTS and len(self._stack) == 1:
                self._emit(before, text[start : position + 1])
                self.state = State.TAIL
            elif before is State.TAIL and not self._stack:
                self.state = State.DONE
            if self.state in (State.DONE, State.BAD):
                return position + 1
        self._emit(self.state, text[start:])
        return len(text)

    def cut(self) -> None:
        """The output has ended before the arguments. Where it is held to calls, a name that is whole is handed out without any."""
        match = _NAME.match(self.raw) if self._calls.held else None
        name = _load(match[1]) if match else None
        if isinstance(name, str) and name:
            self._begin(name)

    def _emit(self, state: State, text: str) -> None:
        if state is State.ARGUMENTS:
            self._calls.arguments(text)

    def _scan(self, char: str) -> bool:
        """Advances the bracket tracker; False where the text cannot go on like this."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            return True
        if not self._stack:
            if char == "{":
                self._stack.append(char)
            return char == "{" or char.isspace()
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._stack.append(char)
        elif char in _PAIRS:
            if self._stack[-1] != _PAIRS[char]:
                return False
            self._stack.pop()
        # Outside of strings JSON has no such characters: this is prose, or another tag.
        return char not in "<>`"

    def _try_begin(self) -> None:
        match = _HEAD.fullmatch(self.raw)
        name = _load(match[1]) if match else None
        if isinstance(name, str) and name:
            self._begin(name)
            self.state = State.ARGUMENTS

    def _begin(self, name: str) -> None:
        self._calls.begin(name)
        self.begun = True

    def _whole(self) -> None:
        value = _load(self.raw)
        name = value.get("name") if isinstance(value, dict) else None
        arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
        if isinstance(arguments, str):
            arguments = _load(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            self.state = State.BAD
            return
        self._begin(name)
        self._calls.arguments(json.dumps(arguments, ensure_ascii=False))
        self.state = State.DONE


def _load(text: str) -> object:
    """The JSON value of `text`, None where it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
