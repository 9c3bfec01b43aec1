"""Outputs that a hostile prompt may draw out of a model: the work for each token does not grow with what came before it.

What a parser looks at again, or copies, at every token is the strings that it holds; lists it only appends to, or pops.
So the strings are measured: after n tokens and after 2n they are alike long, and short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest

from ep_runtime.frontend.api.chat_answer import join_calls
from ep_runtime.frontend.text.reasoning import reasoning_splitter
from ep_runtime.frontend.text.stops import StopMatcher
from ep_runtime.frontend.text.tools import ToolCallDelta, tool_parser

COUNT = 400
MOST = 600
"""Characters held as one string: a name of 256 with its tags, or what a stop string of 512 leaves open."""

TOKENS = [
    " " * 64,
    "\n" * 8,
    " \n",
    "\t",
    "<",
    "{" * 16,
    "[",
    '{"a":',
    "<think",
    "<tool_call",
    "</tool_call",
    "<function=",
    "</parameter",
    "</",
    "<tool_call>",
    '"',
    "\\",
    ", ",
    "word ",
    "x" * 64,
    '{"name":"f","arguments":{',
    '{"name":"f","arguments":{}}',
]
HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {}}'
XML_CALL = "<tool_call>\n<function=f>\n"
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "f", "arguments": {}}'


def parser(name: str) -> Callable[[], Any]:
    return lambda: tool_parser(name, ())


CASES: list[tuple[str, Callable[[], Any], list[str]]] = [
    ("qwen3", lambda: reasoning_splitter("qwen3"), ["", "<think>", "<think>a", "<think>a</think>"]),
    ("deepseek", lambda: reasoning_splitter("deepseek"), ["", "a"]),
    ("hermes", parser("hermes"), ["", "a", "<tool_call>", HERMES_CALL[:-1], HERMES_CALL, '<tool_call>{"x":', '<tool_call>{"x":"']),
    ("xml", parser("qwen3_xml"), ["", "<tool_call>", XML_CALL, XML_CALL + "<parameter=p>", XML_CALL + "</function>"]),
    ("mistral", parser("mistral"), ["", "[TOOL_CALLS]", MISTRAL_CALL[:-1], MISTRAL_CALL]),
    ("stops", lambda: StopMatcher([" " * 512, "\n\n\n\tz", "</tool_call><", "{" * 500 + "x"]), [""]),
]


def strings(part: object) -> Iterator[str]:
    """Every string that an object of ours holds in attributes, its own parts' included."""
    for value in vars(part).values():
        if isinstance(value, str):
            yield value
        elif type(value).__module__.startswith("ep_runtime.") and not isinstance(value, Enum):
            yield from strings(value)


def longest_after(make: Callable[[], Any], start: str, token: str, count: int) -> int:
    """Of all strings held after any of so many tokens, the longest."""
    stream = make()
    stream.push(start)
    longest = 0
    for _ in range(count):
        stream.push(token)
        longest = max(longest, *map(len, strings(stream)), 0)
    return longest


@pytest.mark.parametrize(
    ("make", "start"), [pytest.param(make, start, id=f"{name} {start!r}") for name, make, starts in CASES for start in starts]
)
def test_what_is_looked_at_again_does_not_grow(make: Callable[[], Any], start: str) -> None:
    for token in TOKENS:
        once, twice = longest_after(make, start, token, COUNT), longest_after(make, start, token, 2 * COUNT)
        assert once == twice <= MOST, f"{token!r}: {once} characters, then {twice}"


def test_long_white_space_comes_out_whole() -> None:
    """What is held in pieces is text again where no tag follows, and is dropped where one does."""
    space = "  \n" * COUNT
    for end, content in (("x", space + "x"), ("</tool_call>y", "y"), ("", "")):
        stream = tool_parser("hermes", (), lambda: "id")
        parts = [stream.push(piece)[0] for piece in [HERMES_CALL, *space, *end]]
        assert "".join([*parts, stream.finish()[0]]) == content
    for end, split in (("x", ("", space + "x")), ("<think>x", ("x", ""))):
        splitter = reasoning_splitter("qwen3")
        pairs = [*(splitter.push(piece) for piece in [*space, *end]), splitter.finish()]
        assert ("".join(pair[0] for pair in pairs), "".join(pair[1] for pair in pairs)) == split


def test_calls_are_joined_in_order() -> None:
    deltas = [
        ToolCallDelta(0, "a", "f"),
        ToolCallDelta(0, arguments="{"),
        ToolCallDelta(0, arguments="}"),
        ToolCallDelta(1, "b", "g"),
    ]
    assert [(call["id"], call["function"]["arguments"]) for call in join_calls(deltas)] == [("a", "{}"), ("b", "")]
