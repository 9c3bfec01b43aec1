"""API keys, size and time limits, metrics, and the OpenAPI document."""

from __future__ import annotations

import socket

import openai
import pytest

from tests.http.conftest import Stack, metric, wait_metric
from tests.http.test_errors import check_error
from tests.http.test_lifecycle import MakeStack

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def keyed(model, tokenizer):  # type: ignore[no-untyped-def]
    stack = Stack(model, tokenizer, api_keys=KEYS, max_request_bytes=2000, body_seconds=0.3)
    stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    yield stack
    stack.close()


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic first-key", "Bearer first-key2", "Bearer caf\xe9"])
def test_a_wrong_key_is_401(keyed: Stack, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    for path in ("/v1/models", "/openapi.json", "/nowhere"):
        check_error(keyed.http.get(path, headers=headers), 401)


@pytest.mark.parametrize("key", KEYS)
def test_every_right_key_works(keyed: Stack, key: str) -> None:
    client = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=key, max_retries=0)
    assert client.models.retrieve("tiny").id == "tiny"


def test_probes_need_no_key(keyed: Stack) -> None:
    assert [keyed.http.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]


def test_keys_are_nowhere_in_the_log(keyed: Stack) -> None:
    assert not any(key in line for key in KEYS for line in keyed.server.err)


def test_body_limit(keyed: Stack) -> None:
    headers = {"Authorization": "Bearer first-key"}
    check_error(keyed.http.post("/tokenize", json={"prompt": "a" * 2000}, headers=headers), 413)
    assert keyed.http.post("/tokenize", json={"prompt": "a" * 1000}, headers=headers).status_code == 200


def test_a_body_that_does_not_come(keyed: Stack) -> None:
    host, port = keyed.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        lines = ["POST /tokenize HTTP/1.1", "Host: x", "Authorization: Bearer first-key", "Content-Type: application/json"]
        sock.sendall("\r\n".join([*lines, "Content-Length: 100", "", '{"pro']).encode())
        assert sock.recv(4096).startswith(b"HTTP/1.1 408")


def test_metrics_count(make_stack: MakeStack) -> None:
    stack = make_stack()
    engine = stack.engine_of(3)
    stack.server.wait_line("out", "ready")
    assert stack.chat(max_tokens=4).status_code == 200
    assert stack.chat(max_tokens=4, stream=True).status_code == 200
    assert stack.complete(stop="fox", max_tokens=20).status_code == 200
    assert stack.chat(temperature=9).status_code == 400
    engine.report(77, [77, 76])
    wait_metric(stack, "ep_step", lambda value: value == 77)
    expected = {
        'ep_requests_total{endpoint="/v1/chat/completions",outcome="ok"}': 2,
        'ep_requests_total{endpoint="/v1/chat/completions",outcome="400"}': 1,
        'ep_requests_total{endpoint="/v1/completions",outcome="ok"}': 1,
        'ep_sequences_total{finish="length"}': 2,
        'ep_sequences_total{finish="stop"}': 1,
        "ep_cached_tokens_total": 9,
        "ep_time_to_first_token_seconds_count": 3,
        "ep_time_per_output_token_seconds_count": 3,
        'ep_rank_last_step{rank="1"}': 76,
        "ep_total_slots": 8,
        "ep_engine_host_seconds_total": 19.25,
        "ep_epoch": 3,
    }
    assert {name: metric(stack, name) for name in expected} == expected


def test_document_declares_errors(stack: Stack, keyed: Stack) -> None:
    document = stack.http.get("/openapi.json").json()
    responses = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(responses) == {"200", "400", "404", "408", "413", "415", "429", "500", "503"}
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    schemas = document["components"]["schemas"]
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert {"reasoning", "reasoning_content"} <= set(schemas["ChatMessage"]["properties"])
    assert all("cache_control" in schemas[part]["properties"] for part in ("TextPart", "ImagePart", "VideoPart", "Tool"))
    locked = keyed.http.get("/openapi.json", headers={"Authorization": "Bearer first-key"}).json()
    assert "401" in locked["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert locked["paths"]["/v1/models"]["get"]["security"] == [{"api_key": []}]
    assert "security" not in locked["paths"]["/health"]["get"]
