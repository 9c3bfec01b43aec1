"""Requests that come and go in masses, and neighbours that cost: memory stays flat, queues bounded, and the others are served."""

from __future__ import annotations

import json
import random
from typing import Any

import psutil

from tests.http.conftest import TEXT, Stack, metric, wait_metric
from tests.http.test_disconnect import open_request
from tests.http.test_lifecycle import USER, Background, MakeStack
from tests.http.test_overload import wait_files

MIB = 2**20
PADDING = "x" * 40_000
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def storm(stack: Stack, count: int, draw: random.Random) -> None:
    """Requests of every kind whose clients leave at once, or after their first bytes, or when all is read."""
    for _ in range(count):
        kinds: list[dict[str, Any]] = [{}, {"n": 3}, {"response_format": {"type": "json_object"}}, {"logprobs": True}]
        sock = open_request(stack, stream=draw.random() < 0.5, user=PADDING, **draw.choice(kinds))
        with sock:
            if draw.random() < 0.5:
                sock.recv(64)
    wait_metric(stack, "ep_journal_sequences", lambda value: value == 0)


def test_memory_and_files_stay_flat_under_a_storm_of_aborts(make_stack: MakeStack) -> None:
    stack = make_stack(max_queue=4096)
    engine = stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    process = psutil.Process(stack.server.process.pid)
    draw = random.Random(3)
    storm(stack, 200, draw)
    before, files = process.memory_info().rss, process.num_fds()
    for _ in range(3):
        storm(stack, 200, draw)
        engine.clear()
    # The bodies alone had 24 MB.
    assert process.memory_info().rss - before < 15 * MIB
    wait_files(process, files + 8)
    assert stack.chat().json()["choices"][0]["message"]["content"] == TEXT
    assert engine.running == 0


def test_what_an_engine_in_a_long_step_has_not_read_is_bounded(make_stack: MakeStack) -> None:
    stack = make_stack(max_queue=4)
    engine = stack.engine_of(1, max_num_seqs=8)
    stack.server.wait_line("out", "ready")
    engine.deaf(True)
    # Each leaves a submission and an abort in the engine's inbox: as many as the queue holds, and no more.
    for _ in range(12):
        sock = open_request(stack)
        wait_metric(stack, "ep_journal_sequences", lambda value: value == 1)
        sock.close()
        wait_metric(stack, "ep_journal_sequences", lambda value: value == 0)
    refused = stack.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    engine.deaf(False)
    wait_metric(stack, 'ep_dropped_results_total{reason="ended"}', lambda value: value == 12)
    assert stack.chat().status_code == 200
    # The end of an epoch ends what was waited for as well.
    engine.deaf(True)
    sock = open_request(stack, n=8)
    wait_metric(stack, "ep_journal_sequences", lambda value: value == 8)
    sock.close()
    wait_metric(stack, "ep_journal_sequences", lambda value: value == 0)
    assert stack.chat(n=8).status_code == 429
    engine.stop("killed")
    stack.engine_of(2)
    assert stack.chat(n=8).status_code == 200


def test_a_stream_that_is_not_read_holds_nobody_up(make_stack: MakeStack) -> None:
    stack = make_stack(stream_buffer_bytes=2**26)
    engine = stack.engine_of(1, max_model_len=100_000)
    stack.server.wait_line("out", "ready")
    stack.output = stack.tokenizer.encode(TEXT * 200, False)
    unread = open_request(stack, stream=True, logprobs=True, top_logprobs=20, ignore_eos=True, max_tokens=90_000)
    engine.submits(1)
    for _ in range(3):
        assert stack.chat(max_tokens=20).json()["usage"]["completion_tokens"] == 20
    # Its own tokens were taken all the time.
    wait_metric(stack, "ep_generated_tokens_total", lambda value: value > 2_000)
    assert metric(stack, "ep_journal_sequences") == 1
    unread.close()
    wait_metric(stack, "ep_journal_sequences", lambda value: value == 0)


def test_a_template_that_would_not_end_is_the_clients_error_and_delays_no_stream(make_stack: MakeStack) -> None:
    template = "{% if endless %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    stack = make_stack(chat_template=template)
    engine = stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    endless = Background(stack.chat, chat_template_kwargs={"endless": True})
    literal = "{{ cycler.__init__.__globals__ }}{% for i in [] %}"
    body = {"prompt": literal, "max_tokens": 3, "stream": True}
    events = stack.http.post("/v1/completions", json=body).text.splitlines()
    assert sum("finish_reason" in line for line in events) == 3
    refused = endless.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "template_error")
    assert "ran longer" in refused.json()["error"]["message"]
    # What a client writes is text and never a template.
    engine.clear()
    answer = stack.http.post("/v1/chat/completions", json={"messages": [{**USER[0], "content": literal}], "max_tokens": 1})
    assert answer.status_code == 200, json.dumps(answer.json())
    assert stack.tokenizer.decode(engine.submits(1)[0].prompt) == literal
