"""Clients that go away, read slowly, or come too many."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from typing import Any

import pytest

from protocol.messages import SequenceUpdate
from tests.http.conftest import TEXT, Stack, metric, wait_metric
from tests.http.test_lifecycle import Background, MakeStack, read_pieces

USER = [{"role": "user", "content": "Hi"}]


def open_request(stack: Stack, **fields: Any) -> socket.socket:
    """Send a chat request over a bare socket and leave the answer to come."""
    host, port = stack.url.removeprefix("http://").split(":")
    body = json.dumps({"messages": USER, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sock = socket.create_connection((host, int(port)), timeout=30)
    sock.sendall(head.encode() + body)
    return sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_a_client_that_leaves_frees_its_sequences(stack: Stack, stream: bool, started: bool) -> None:
    stack.engine.hold()
    sock = open_request(stack, stream=stream, n=2)
    submits = stack.engine.submits(2)
    if started:
        before = metric(stack, "ep_generated_tokens_total")
        stack.engine.step(2)
        wait_metric(stack, "ep_generated_tokens_total", lambda value: value >= before + 4)
    sock.close()
    for submit in submits:
        stack.engine.aborted(submit.request_id)


def outcomes(stack: Stack) -> Counter[str]:
    """How many chat requests have ended, by outcome."""
    found = re.findall(
        r'^ep_requests_total{endpoint="/v1/chat/completions",outcome="(.*)"} (.*)$', stack.http.get("/metrics").text, re.M
    )
    return Counter({outcome: int(float(count)) for outcome, count in found})


def test_a_client_that_leaves_before_its_body_is_complete_is_no_failure(stack: Stack) -> None:
    before = outcomes(stack)
    host, port = stack.url.removeprefix("http://").split(":")
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(head.encode() + b'{"messages":')
    wait_metric(stack, 'ep_request_seconds_count{endpoint="/v1/chat/completions"}', lambda count: count > before.total())
    assert outcomes(stack) - before == {"disconnected": 1}


def test_a_client_that_leaves_during_recovery_is_not_replayed(make_stack: MakeStack) -> None:
    stack = make_stack()
    first = stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    first.hold()
    gone, stays = open_request(stack), Background(stack.chat)
    first.submits(2)
    first.stop("killed")
    gone.close()
    wait_metric(stack, "ep_journal_sequences", lambda value: value == 1)
    second = stack.engine_of(2)
    assert stays.result().json()["choices"][0]["message"]["content"] == TEXT
    assert len(second.received) == 1


def test_full_queue_is_429(make_stack: MakeStack) -> None:
    stack = make_stack(max_queue=1)
    engine = stack.engine_of(1, max_num_seqs=2)
    stack.server.wait_line("out", "ready")
    engine.hold()
    running = [Background(stack.chat) for _ in range(3)]
    engine.submits(3)
    refused = stack.chat()
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert stack.chat(n=4).status_code == 400
    engine.release()
    assert [one.result().status_code for one in running] == [200] * 3
    assert stack.chat().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_may_refuse(stack: Stack, stream: bool) -> None:
    refusal = SequenceUpdate(request_id="", tokens=[], finish="error", error="no room", status=429, retry_after=2.5)
    stack.engine.refuse(refusal)
    answer = stack.chat(stream=stream)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert "no room" in answer.json()["error"]["message"]


def test_one_refused_sample_ends_its_siblings(stack: Stack) -> None:
    stack.engine.hold()
    stack.engine.refuse(SequenceUpdate(request_id="", tokens=[], finish="error", error="broken"))
    assert stack.chat(n=3).status_code == 500
    for submit in stack.engine.submits(3)[1:]:
        stack.engine.aborted(submit.request_id)


def test_an_error_in_the_middle_of_a_stream(stack: Stack) -> None:
    stack.engine.hold()
    stack.engine.step(3)
    with stack.http.stream("POST", "/v1/chat/completions", json={"messages": USER, "stream": True}) as answer:
        lines = answer.iter_lines()
        read_pieces(lines, 3)
        request_id = stack.engine.submits(1)[0].request_id
        stack.engine.fail(SequenceUpdate(request_id=request_id, tokens=[], finish="error", error="command failed", status=500))
        rest = [line for line in lines if line]
    assert json.loads(rest[0][6:])["error"]["message"] == "command failed"
    assert rest[-1] == "data: [DONE]"


def test_a_slow_reader_is_cut_off(make_stack: MakeStack) -> None:
    stack = make_stack(stream_buffer_bytes=20_000)
    engine = stack.engine_of(1, max_model_len=100_000)
    stack.server.wait_line("out", "ready")
    stack.output = stack.tokenizer.encode(TEXT * 200, False)
    sock = open_request(stack, stream=True, logprobs=True, top_logprobs=20, ignore_eos=True, max_tokens=90_000)
    engine.aborted(engine.submits(1)[0].request_id)
    wait_metric(stack, "ep_journal_sequences", lambda value: value == 0)
    sock.close()
    assert stack.chat(max_tokens=3).status_code == 200
