"""Which JSON types a parameter's schema allows, and the value that a text stands for under them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TYPE_OF = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
_MAX_DEPTH = 16


def tool_schema(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(name, parameter schema) of an OpenAI tool; one without parameters takes none. Raises ValueError when it is no such tool."""
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("a tool needs function.name")
    schema = function.get("parameters")
    if schema is None:
        return function["name"], {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping):
        raise ValueError(f"tool {function['name']}: parameters is not a JSON object")
    return function["name"], dict(schema)


def allowed_types(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """JSON type names that `schema` allows; `$ref` is looked up inside `root`. Empty when the schema says nothing of types."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    if isinstance(ref := schema.get("$ref"), str):
        return allowed_types(_lookup(root, ref), root, depth + 1)
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(_TYPE_OF.get(type(value), "object") for value in values)
    found: frozenset[str] = frozenset()
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key) or ():
            found |= allowed_types(part, root, depth + 1)
    return found


def typed_value(text: str, types: frozenset[str]) -> object:
    """The value that a parameter's text stands for: JSON if a type other than string allows it, else the text itself.

    Python's spelling of booleans and None is understood where those types are allowed.
    """
    if not types - {"string"}:
        return text
    words = {"true": True, "false": False} if "boolean" in types else {}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    if "null" in types and text.strip().lower() in ("null", "none"):
        return None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text
    kind = _TYPE_OF[type(value)]
    if kind == "integer" and "number" in types:
        return value
    if kind == "number" and "integer" in types and isinstance(value, float) and value.is_integer():
        return int(value)
    # A string that merely looks like another type stays a string where strings are allowed.
    return value if kind in types or "string" not in types else text


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, frozenset[str]]]:
    """Tool name -> parameter name -> allowed types, of OpenAI's tool list."""
    table = {}
    for tool in tools:
        name, schema = tool_schema(tool)
        properties = schema.get("properties")
        entries = properties.items() if isinstance(properties, Mapping) else ()
        table[name] = {key: allowed_types(value, schema) for key, value in entries}
    return table


def _lookup(root: Mapping[str, Any], ref: str) -> object:
    """The part of `root` that a local reference `#/a/b` points to, None where there is none."""
    if not ref.startswith("#/"):
        return None
    found: object = root
    for key in ref[2:].split("/"):
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
