"""What fuzzing found in the HTTP process, each as the smallest case that shows it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.conftest import Stack

LOOP: dict[str, Any] = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
WIDE: dict[str, Any] = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1500)}}


def schema(inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": inner}}


def test_a_schema_that_compiles_and_admits_nothing_is_the_clients_error(stack: Stack) -> None:
    refused = stack.chat(response_format=schema(LOOP))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_grammar")


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_passes_its_limits_while_it_is_followed_is_the_clients_error(stack: Stack, stream: bool) -> None:
    answer = stack.chat(response_format=schema(WIDE), stream=stream)
    assert "invalid_grammar" in answer.text
    assert answer.status_code == (200 if stream else 400)
    assert stack.chat().status_code == 200
