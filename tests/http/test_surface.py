"""schemathesis over the OpenAPI document: no 500, and every answer is one that the document declares."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.http.conftest import Stack

# Whether wrong data is refused is asked in test_errors: schemathesis' negative cases include a branch of a union made wrong in such
# a way that it is another branch, which the server rightly takes.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


OPERATIONS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/health", "GET"),
    ("/ping", "GET"),
    ("/ping", "POST"),
    ("/version", "GET"),
    ("/ready", "GET"),
    ("/metrics", "GET"),
]


@pytest.fixture
def document(stack: Stack) -> schemathesis.BaseSchema:
    """The served document. A short output keeps the many accepted requests cheap."""
    stack.output = "Hi."
    return schemathesis.openapi.from_url(f"{stack.url}/openapi.json")


def test_every_operation_is_listed(document: schemathesis.BaseSchema) -> None:
    found = [(operation.ok().path, operation.ok().method.upper()) for operation in document.get_all_operations()]
    assert sorted(found) == sorted(OPERATIONS)


CASES = [
    *((path, method, GenerationMode.POSITIVE) for path, method in OPERATIONS),
    # Without parameters or body there is nothing to send wrongly.
    *((path, method, GenerationMode.NEGATIVE) for path, method in OPERATIONS if method == "POST" and path != "/ping"),
]


@pytest.mark.parametrize(("path", "method", "mode"), CASES, ids=lambda value: getattr(value, "value", value))
def test_no_answer_beyond_the_document(document: schemathesis.BaseSchema, path: str, method: str, mode: GenerationMode) -> None:
    operation = document[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=100 if method == "POST" else 5,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body.pop("model", None)  # a random name is refused before anything else is looked at
        statuses.append(case.call_and_validate(checks=CHECKS).status_code)

    statuses: list[int] = []
    check()
    if mode is GenerationMode.POSITIVE:
        assert any(status == 200 for status in statuses) or "{" in path, statuses
