"""Tool calls in a model's output: the parsers by name, and what they have in common."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ep_runtime.frontend.text.tool_delta import ToolCallDelta
from ep_runtime.frontend.text.tools_hermes import HermesParser
from ep_runtime.frontend.text.tools_mistral import MARKER, MistralParser
from ep_runtime.frontend.text.tools_xml import XmlParser

__all__ = ["TOOL_PARSER_NAMES", "ToolCallDelta", "ToolParser", "choose_parser", "marker_tokens", "tool_parser"]

TOOL_PARSER_NAMES = ("hermes", "qwen3_xml", "mistral", "none")


class ToolParser(Protocol):
    """A stream parser. Its total result does not depend on how the stream is cut into pieces."""

    def push(self, content: str) -> tuple[str, list[ToolCallDelta]]:
        """Takes a piece of content; returns plain content and pieces of tool calls to emit."""

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """The output has ended: what was held back. A call that never became one comes out as content."""


class PlainParser:
    """The parser "none": everything is content."""

    def push(self, content: str) -> tuple[str, list[ToolCallDelta]]:
        """Returns the piece as it is."""
        return content, []

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """Nothing is ever held back."""
        return "", []


def tool_parser(name: str, tools: Sequence[dict[str, Any]] | None = None, make_id: Callable[[], str] | None = None) -> ToolParser:
    """A fresh parser for one output. Raises ValueError for an unknown name.

    `tools` (OpenAI's list) gives "qwen3_xml" the types of its parameters. `make_id` makes call ids; by default `call_` and 24
    random hex digits, or 9 letters and digits for "mistral", whose templates accept nothing else.
    """
    match name:
        case "hermes":
            return HermesParser(make_id or _openai_id)
        case "qwen3_xml":
            return XmlParser(make_id or _openai_id, tools or ())
        case "mistral":
            return MistralParser(make_id or _mistral_id)
        case "none":
            return PlainParser()
    raise ValueError(f"unknown tool parser {name!r}; known: {', '.join(TOOL_PARSER_NAMES)}")


def choose_parser(template_text: str, family: str = "") -> str:
    """The parser for "auto": by the syntax that the chat template teaches the model, else by the model's family.

    A template that never mentions tools gives "none": the model is not told of any.
    """
    if "<function=" in template_text:
        return "qwen3_xml"
    if "<tool_call>" in template_text:
        return "hermes"
    if MARKER in template_text:
        return "mistral"
    if "tools" in template_text:
        name = family.lower()
        if "qwen3_5" in name:
            return "qwen3_xml"
        if "qwen" in name:
            return "hermes"
        if "mistral" in name or "mixtral" in name:
            return "mistral"
    return "none"


def marker_tokens(name: str) -> tuple[str, ...]:
    """Texts that the parser `name` must see, special tokens or not: `keep_special` of a detokenizer."""
    tags = ("<tool_call>", "</tool_call>")
    return {"mistral": (MARKER,), "hermes": tags, "qwen3_xml": tags}.get(name, ())


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
