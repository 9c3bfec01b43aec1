"""Grammar rules (llguidance's Lark dialect) for calls of tools in the syntaxes of the tool parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ep_runtime.frontend.text.errors import GrammarError
from ep_runtime.frontend.text.schema_types import allowed_types, tool_schema
from ep_runtime.frontend.text.tokenizer import Tokenizer

MAX_CALLS = 16
"""Calls in one output."""

# Lazy: the first end tag ends the text, so that the text never holds one.
_BARE_TEXT = r"bare_text[lazy]: /(?s:.*)\n<\/parameter>/"

_OPENINGS = {"hermes": "<tool_call>", "qwen3_xml": "<tool_call>", "mistral": "[TOOL_CALLS]"}
"""What a call, or a list of calls, begins with."""

Schema = dict[str, Any]


def literal(text: str, tokenizer: Tokenizer) -> str:
    """`text` as a terminal: the one token where the vocabulary has it as an added token (`<[id]>`), else its characters."""
    index = tokenizer.token_id(text)
    return quoted(text) if index is None else f"<[{index}]>"


def quoted(text: str) -> str:
    """`text` as a string terminal."""
    return json.dumps(text, ensure_ascii=False)


def tool_calls_rule(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any],
    parser_name: str,
    tokenizer: Tokenizer,
    schema_text: Callable[[Schema | bool], str],
    parallel: bool,
) -> str:
    """The start rule's right-hand side, and further rules on lines of their own.

    Raises GrammarError for a choice that names no tool, or a parser without a syntax for calls.
    """
    chosen, several = _chosen(tools, choice)
    opening = literal(_opening(parser_name), tokenizer)
    more = several and parallel
    if parser_name == "mistral":
        return _call_list(chosen, opening, schema_text, more)
    call, further = _tagged_call(chosen, parser_name, opening, tokenizer, schema_text)
    return _repeated(call, quoted("\n"), more) + further


def calls_in_words_rule(
    tools: Sequence[Mapping[str, Any]],
    parser_name: str,
    tokenizer: Tokenizer,
    schema_text: Callable[[Schema | bool], str],
    parallel: bool,
) -> str:
    """As `tool_calls_rule`, for calls of any of the tools with any text around them; without `parallel`, the first is the end.

    Where the opening tag is one token, the same characters spelled otherwise would be a call to the parser, and no text has them.
    Words meet words only across another token: two of them side by side could spell the tag together. Raises GrammarError.
    """
    chosen, _ = _chosen(tools, "required")
    tag = _opening(parser_name)
    token = tokenizer.token_id(tag)
    opening = "lead" if token is None else f"WORDS? <[{token}]>"
    if parser_name == "mistral":
        call, further = _call_list(chosen, opening, schema_text, parallel), ""
    else:
        call, further = _tagged_call(chosen, parser_name, opening, tokenizer, schema_text)
    # The library takes added tokens for none of a text's characters. Of special ones nothing is seen: the text on both sides of
    # one could spell the tag, and so could a piece of the tag.
    visible = sorted(tokenizer.added_ids - tokenizer.special_ids - set(tokenizer.eos_token_ids))
    others = [str(index) for index in visible if tokenizer.token_text(index) not in tag]
    other = [f"WORDS? <[{','.join(others)}]>"] if others else []
    several = f"({' | '.join([*other, call])})* WORDS?"
    rule = several if parallel else f"({' | '.join(other)})* ({call} | WORDS?)" if other else f"{call} | WORDS?"
    words = f"WORDS: /(?s:.+)/ & ~/(?s:.*){re.escape(tag)}(?s:.*)/"
    # Lazy: it ends at the first tag, which is the only one in it.
    lead = f"\nlead[lazy]: /(?s:.*){re.escape(tag)}/" if token is None else ""
    return f"{rule}\n{words}{lead}{further}"


def _opening(parser_name: str) -> str:
    if parser_name not in _OPENINGS:
        raise GrammarError(f"tool calls cannot be forced: the parser {parser_name!r} has no syntax for them")
    return _OPENINGS[parser_name]


def _tagged_call(
    chosen: list[tuple[str, Schema]],
    parser_name: str,
    opening: str,
    tokenizer: Tokenizer,
    schema_text: Callable[[Schema | bool], str],
) -> tuple[str, str]:
    """One call in tags of its own, and further rules on lines of their own."""
    body, further = (_json_call, "") if parser_name == "hermes" else (_xml_call, f"\n{_BARE_TEXT}")
    bodies = " | ".join([body(name, schema, schema_text) for name, schema in chosen])
    return f'({opening} "\\n" ({bodies}) "\\n" {literal("</tool_call>", tokenizer)})', further


def _call_list(chosen: list[tuple[str, Schema]], opening: str, schema_text: Callable[[Schema | bool], str], more: bool) -> str:
    """Mistral's list of calls."""
    call = f"({' | '.join([_json_call(name, schema, schema_text) for name, schema in chosen])})"
    return f'{opening} " "? "[" {_repeated(call, quoted(", "), more)} "]"'


def _chosen(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any]) -> tuple[list[tuple[str, Schema]], bool]:
    """The tools to choose from, and whether several calls may follow one another."""
    try:
        known = [tool_schema(tool) for tool in tools]
        wanted = choice if isinstance(choice, str) else tool_schema(choice)[0]
        any_tool = isinstance(choice, str) and choice in ("required", "any")
    except ValueError as error:
        raise GrammarError(str(error)) from error
    if not known:
        raise GrammarError("there are no tools to call")
    if any_tool:
        return known, True
    found = [(name, schema) for name, schema in known if name == wanted]
    if not found:
        raise GrammarError(f"tool_choice names {wanted!r}, which is not among the tools")
    return found[:1], False


def _repeated(call: str, separator: str, more: bool) -> str:
    return f"{call} ({separator} {call}){{0,{MAX_CALLS - 1}}}" if more else call


def _json_call(name: str, schema: Schema, schema_text: Callable[[Schema | bool], str]) -> str:
    head = '{"name": ' + json.dumps(name, ensure_ascii=False) + ', "arguments": '
    return f'({quoted(head)} %json {schema_text(_object(name, schema))} "}}")'


def _xml_call(name: str, schema: Schema, schema_text: Callable[[Schema | bool], str]) -> str:
    """Required parameters, and optional ones where the schema has them, in the schema's order.

    Of a string's schema only `enum` and `const` are enforced: the syntax has no quotes and no escapes.
    """
    if any(char in name for char in "<>\n"):
        raise GrammarError(f"tool {name!r}: the name cannot be written in this syntax")
    schema = _object(name, schema)
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    if missing := [key for key in required if key not in properties]:
        raise GrammarError(f"tool {name}: required parameter {missing[0]!r} has no schema")
    parts = [quoted(f"<function={name}>")]
    for key, value in properties.items():
        whole = f"({quoted(chr(10) + f'<parameter={key}>' + chr(10))} {_xml_value(value, schema, schema_text)})"
        parts.append(whole if key in required else f"{whole}?")
    return f"({' '.join(parts)} {quoted(chr(10) + '</function>')})"


def _xml_value(value: Any, root: Schema, schema_text: Callable[[Schema | bool], str]) -> str:
    """A parameter's value with its end tag: bare text where strings are allowed, else JSON under the parameter's schema."""
    end = quoted("\n</parameter>")
    types = allowed_types(value, root)
    if types and "string" not in types:
        shared: Schema = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"%json {schema_text({**value, **shared})} {end}"
    options = [value["const"]] if "const" in value else value.get("enum")
    if options is not None and all(isinstance(option, str) for option in options):
        return f"({' | '.join(quoted(option) for option in options)}) {end}"
    return "bare_text"


def _object(name: str, schema: Schema) -> Schema:
    """A schema whose values are objects: arguments are always one."""
    if schema.get("type", "object") != "object":
        raise GrammarError(f"tool {name}: parameters must be a schema of type object")
    return {**schema, "type": "object"}
