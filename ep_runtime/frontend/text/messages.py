"""Brings OpenAI chat messages into the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

from ep_runtime.frontend.text.errors import TemplateError

MEDIA_PARTS = ("image", "video")
"""Parts for which a template writes a placeholder; what is shown there comes by another way."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateNeeds:
    """What a template understands.

    `content_lists`: it loops over a message's content. `content_strings`: it takes content that is a string (true too when it never
    loops). `developer`: it knows the role "developer".
    """

    content_lists: bool
    content_strings: bool
    developer: bool


def template_needs(tree: nodes.Template, source: str) -> TemplateNeeds:
    """Reads from a template's syntax tree what it understands."""
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            names.add(assign.target.name)
    loops = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    tests = any(test.name == "string" and _is_content(test.node, names) for test in tree.find_all(nodes.Test))
    return TemplateNeeds(content_lists=loops, content_strings=tests or not loops, developer="developer" in source)


def normalise(messages: Sequence[Mapping[str, Any]], needs: TemplateNeeds) -> list[dict[str, Any]]:
    """Copies of the messages in the template's form; other keys (name, tool_call_id, ...) pass through.

    Content parts are joined by line breaks, or passed as a list where the template loops over content, images and videos as
    `{"type": "image"}` and `{"type": "video"}`; missing content becomes the empty string. Argument text of tool calls becomes the
    object it encodes. Raises TemplateError naming the message that cannot be.
    """
    return [_message(index, message, needs) for index, message in enumerate(messages)]


def _message(index: int, message: Mapping[str, Any], needs: TemplateNeeds) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TemplateError(f"{where}: a message is an object with a role")
    result = {key: value for key, value in message.items() if value is not None}
    if result["role"] == "developer" and not needs.developer:
        result["role"] = "system"
    result["content"] = _content(where, message.get("content"), needs)
    for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if name in result:
            result.setdefault(other, result[name])
    if "tool_calls" in result:
        if not isinstance(result["tool_calls"], Sequence) or isinstance(result["tool_calls"], str):
            raise TemplateError(f"{where}.tool_calls: not a list")
        result["tool_calls"] = [_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(result["tool_calls"])]
        if not result["tool_calls"]:
            del result["tool_calls"]
    return result


def _content(where: str, content: object, needs: TemplateNeeds) -> str | list[dict[str, str]]:
    if content is None:
        content = ""
    if isinstance(content, str):
        return content if needs.content_strings else [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise TemplateError(f"{where}.content: neither a string nor a list of parts")
    parts = [_part(f"{where}.content[{i}]", part, needs) for i, part in enumerate(content)]
    return parts if needs.content_lists else "\n".join(part["text"] for part in parts)


def _part(where: str, part: object, needs: TemplateNeeds) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in MEDIA_PARTS and needs.content_lists:
        return {"type": kind}
    if not isinstance(part, Mapping) or kind not in _TEXT_PARTS:
        raise TemplateError(f"{where}: content of type {kind!r} is not supported by this model")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise TemplateError(f"{where}.{_TEXT_PARTS[kind]}: not a string")
    return {"type": "text", "text": text}


def _tool_call(where: str, call: object) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        raise TemplateError(f"{where}: a tool call is an object with a function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _arguments(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(text: str) -> object:
    """The object that `text` encodes; the text itself where a model once wrote something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression is a message's content: `x.content`, `x['content']`, a name for it, or a filter of one of these."""
    match node:
        case nodes.Filter(node=nodes.Expr() as inner):
            return _is_content(inner, names)
        case nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name():
            return node.name in names
        case nodes.CondExpr():
            return _is_content(node.expr1, names)
    return False
