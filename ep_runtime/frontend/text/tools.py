"""Tool calls in a model's output: the parsers by name, and what they have in common."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ep_runtime.frontend.text.calls_or_json import CallsOrJson
from ep_runtime.frontend.text.tool_delta import ToolCallDelta, ToolParser
from ep_runtime.frontend.text.tools_hermes import HermesParser
from ep_runtime.frontend.text.tools_mistral import MARKER, MistralParser
from ep_runtime.frontend.text.tools_xml import XmlParser

__all__ = ["TOOL_PARSER_NAMES", "OutputForm", "ToolCallDelta", "ToolParser", "choose_parser", "marker_tokens", "tool_parser"]

TOOL_PARSER_NAMES = ("hermes", "qwen3_xml", "mistral", "none")
OutputForm = Literal["free", "calls", "calls or json"]
"""What an output is held to: nothing, calls alone, or either calls alone or JSON alone."""


class PlainParser:
    """The parser "none": everything is content."""

    def push(self, content: str) -> tuple[str, list[ToolCallDelta]]:
        """Returns the piece as it is."""
        return content, []

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """Nothing is ever held back."""
        return "", []


def tool_parser(
    name: str,
    tools: Sequence[dict[str, Any]] | None = None,
    make_id: Callable[[], str] | None = None,
    form: OutputForm = "free",
) -> ToolParser:
    """A fresh parser for one output. Raises ValueError for an unknown name.

    `tools` (OpenAI's list) gives "qwen3_xml" the types of its parameters. `make_id` makes call ids; by default `call_` and 24
    random hex digits, or 9 letters and digits for "mistral", whose templates accept nothing else. In a `form` that a grammar holds
    the output to, nothing of a call ever comes out as content.
    """
    if form == "calls or json" and (tags := marker_tokens(name)):
        return CallsOrJson(tool_parser(name, tools, make_id, "calls"), tags[0])
    held = form == "calls"
    match name:
        case "hermes":
            return HermesParser(make_id or _openai_id, held)
        case "qwen3_xml":
            return XmlParser(make_id or _openai_id, tools or (), held)
        case "mistral":
            return MistralParser(make_id or _mistral_id, held)
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
