"""JSON schemas that are meant to be too much: repeats of repeats, alternatives of alternatives, loops, contradictions."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz.values import INTEGERS, mutate_tree, tree

PATTERNS = [
    "(a{1000}){1000}",
    "(((a?){50}){50}){50}a{1000}",
    "(a|b)*a(a|b){30}",
    "(?=a)b",
    "(a)\\1",
    "[^\\x00-\\U0010ffff]",
    "^(a+)+$",
    "\\p{L}{500}",
    "(",
    "[z-a]",
    "a{99999999999}",
    "(?i)" + "abc" * 300,
    ".{0,5000}",
    "",
]


def _nested(word: str, depth: int, width: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {word: [schema] * width}
    return schema


def hostile_schema(rng: random.Random) -> Any:
    """One schema; some of them are fine."""
    number = rng.choice(INTEGERS)
    shapes: list[Any] = [
        {"type": "string", "pattern": rng.choice(PATTERNS)},
        {"type": "string", "minLength": number, "maxLength": rng.choice(INTEGERS)},
        {"type": "string", "format": rng.choice(["date-time", "email", "uri", "regex", "nonsense"])},
        {"type": "array", "items": {"type": "integer"}, "minItems": number, "maxItems": rng.choice(INTEGERS)},
        {"type": "integer", "minimum": number, "maximum": rng.choice(INTEGERS)},
        {"type": "number", "multipleOf": rng.choice([0, 1e-300, 1e300, -1, 0.1])},
        {"type": "number", "exclusiveMinimum": rng.choice([1e308, -1e308, 0]), "exclusiveMaximum": rng.choice([1e308, 0, -5])},
        _nested(rng.choice(["anyOf", "allOf", "oneOf"]), rng.choice([1, 5, 11]), rng.choice([1, 2])),
        {"$ref": rng.choice(["#", "#/$defs/a", "#/nowhere", "http://127.0.0.1:1/x", "file:///etc/passwd"])},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}, "$ref": "#/$defs/a"},
        {"enum": [*range(rng.choice([0, 1, 5000]))]},
        {"const": tree(rng)},
        {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(rng.choice([1, 60, 1500]))}},
        {"type": "object", "properties": {"x": {}}, "required": ["y", "x", "x"], "additionalProperties": False},
        {"type": "object", "patternProperties": {rng.choice(PATTERNS): {"type": "integer"}}},
        {"type": ["string", "integer", "null", "nothing"]},
        {"not": {}},
        {"if": {"type": "string"}, "then": {"minLength": 3}, "else": False},
        True,
        tree(rng),
    ]
    schema = rng.choice(shapes)
    if not isinstance(schema, dict) or rng.random() < 0.2:
        return {"type": "object", "properties": {"x": schema}}
    return mutate_tree(rng, schema) if rng.random() < 0.3 else schema
