"""What one client does must not reach the others: long texts, large bodies, slow grammars, idle and unread connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from pydantic import ValidationError

from ep_runtime.frontend.api.chat_schema import ChatRequest
from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.api.strict_json import MAX_CONTAINERS, MAX_DEPTH, MAX_KEYS, parse_json
from ep_runtime.frontend.api.tokenize_schema import DetokenizeRequest
from ep_runtime.frontend.compiling import MAX_LATE, GrammarCompiler
from ep_runtime.frontend.engine_client import EngineClient
from ep_runtime.frontend.journal import Journal
from ep_runtime.frontend.link import ZmqLink
from ep_runtime.frontend.metrics import Metrics
from ep_runtime.frontend.text.grammar import GrammarFactory
from ep_runtime.frontend.text.tokenizer import Tokenizer
from protocol.codec import encode
from protocol.messages import EpochEnded
from tests.http.conftest import TEXT, wait_metric
from tests.http.test_disconnect import open_request
from tests.http.test_lifecycle import Background, MakeStack

IDLE = 2000


def test_a_long_text_lets_other_threads_run(tokenizer: Tokenizer) -> None:
    done = threading.Event()

    def work() -> None:
        tokenizer.encode(TEXT * 20_000)
        done.set()

    thread = threading.Thread(target=work)
    started = last = time.monotonic()
    longest = 0.0
    thread.start()
    while not done.is_set():
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    thread.join()
    # While the library holds the interpreter this thread stands still for nearly all of the time.
    assert longest < (last - started) / 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [[]] * (MAX_CONTAINERS + 1)}, "objects and lists"),
        ({"logit_bias": {str(key): 1 for key in range(MAX_KEYS + 1)}}, "keys"),
        ({"metadata": [{str(key): 1 for key in range(MAX_KEYS + 1)}]}, "keys"),
    ],
    ids=["containers", "keys", "inner keys"],
)
def test_bodies_of_very_many_values_are_refused(body: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words):
        parse_json(json.dumps(body).encode())


def test_bodies_within_the_limits_are_taken() -> None:
    deep: Any = 0
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    body = {"a": [[1, {}]] * 10_000, "b": deep, "c": list(range(10**5)), "d": {str(key): "[{:" for key in range(MAX_KEYS)}}
    assert parse_json(json.dumps(body).encode()) == body
    with pytest.raises(ApiError, match="deeper than 100"):
        parse_json(json.dumps([{"x": [deep]}]).encode())


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatRequest, {"messages": [1] * 100_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 100_000}]}),
        (DetokenizeRequest, {"tokens": ["x"] * 100_000}),
    ],
    ids=["messages", "parts", "tokens"],
)
def test_the_first_bad_element_ends_the_validation(model: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    assert refused.value.error_count() <= 2


def test_late_grammars_are_left_behind_and_bounded(tokenizer: Tokenizer) -> None:
    release = threading.Event()

    def never(factory: GrammarFactory) -> Any:
        release.wait()
        return factory.json_object()

    async def scenario() -> None:
        compiler = GrammarCompiler(GrammarFactory(tokenizer), seconds=0.05, max_bytes=1000)
        late = await asyncio.gather(*[compiler.compile(never, {}, "p") for _ in range(MAX_LATE - 1)], return_exceptions=True)
        assert [error.status_code for error in late] == [400] * (MAX_LATE - 1)
        quick = GrammarCompiler(GrammarFactory(tokenizer), seconds=60, max_bytes=1000)
        assert (await quick.compile(lambda factory: factory.json_object(), {}, "p")).mask()
        quick.close()
        with pytest.raises(ApiError, match=r"took longer than 0\.05 s"):
            await compiler.compile(never, {}, "p")
        with pytest.raises(ApiError) as busy:
            await compiler.compile(never, {}, "p")
        assert busy.value.status_code == 503
        release.set()
        compiler.close()

    asyncio.run(scenario())


STUCK_GRAMMAR = """
import threading
from ep_runtime.frontend.text.grammar import GrammarFactory
GrammarFactory.json_schema = lambda self, schema: threading.Event().wait()
"""


def test_a_grammar_that_never_compiles_does_not_keep_the_process(make_stack: MakeStack) -> None:
    stack = make_stack(before=STUCK_GRAMMAR, grammar_seconds=0.2)
    stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    refused = stack.chat(response_format={"type": "json_object"})
    assert refused.status_code == 400
    assert "longer than 0.2 s" in refused.json()["error"]["message"]
    assert stack.chat().status_code == 200
    stack.http.close()
    stack.server.terminate()
    assert stack.server.wait() == 0


def test_bodies_held_at_once_are_bounded(make_stack: MakeStack) -> None:
    stack = make_stack(max_request_bytes=2**20, max_held_bytes=2**20)
    engine = stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    engine.hold()
    large = {"user": "x" * 900_000}
    running = Background(stack.chat, **large)
    engine.submits(1)
    refused = stack.chat(**large)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    small = Background(stack.chat)
    engine.submits(2)
    engine.release()
    assert [running.result().status_code, small.result().status_code] == [200, 200]
    assert stack.chat(**large).status_code == 200


def test_an_answer_that_grows_too_large_is_ended(make_stack: MakeStack) -> None:
    stack = make_stack(answer_bytes=20_000)
    engine = stack.engine_of(1, max_model_len=100_000)
    stack.server.wait_line("out", "ready")
    answer = stack.chat(logprobs=True, top_logprobs=20, ignore_eos=True, max_tokens=90_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "answer_too_large")
    engine.aborted(engine.submits(1)[0].request_id)
    scored = stack.complete(prompt=[5] * 400, max_tokens=0, prompt_logprobs=20)
    assert (scored.status_code, scored.json()["error"]["code"]) == (400, "answer_too_large")
    assert stack.chat().status_code == 200


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * IDLE)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_idle_connections_are_served_around_and_ended(make_stack: MakeStack, many_files: None) -> None:
    stack = make_stack(header_seconds=2.0)
    stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    host, port = stack.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port)), timeout=30) for _ in range(IDLE)]
    for number, sock in enumerate(idle):
        if number % 2:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
    assert stack.chat().status_code == 200
    for sock in idle:
        with sock, contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert stack.chat().status_code == 200


def test_a_connection_that_is_not_read_is_ended(make_stack: MakeStack) -> None:
    stack = make_stack(stream_buffer_bytes=20_000, write_seconds=0.5)
    engine = stack.engine_of(1, max_model_len=100_000)
    stack.server.wait_line("out", "ready")
    stack.output = stack.tokenizer.encode(TEXT * 200, False)
    sock = open_request(stack, stream=True, logprobs=True, top_logprobs=20, ignore_eos=True, max_tokens=90_000)
    engine.aborted(engine.submits(1)[0].request_id)
    port = sock.getsockname()[1]

    def peers() -> set[int]:
        return {c.raddr.port for c in psutil.Process(stack.server.process.pid).net_connections() if c.raddr}

    wait_metric(stack, "ep_journal_sequences", lambda value: value == 0 and port not in peers())
    sock.close()


class Counting(EngineClient):
    handled = 0

    def _handle(self, message: Any) -> None:
        self.handled += 1


def test_a_backlog_of_steps_leaves_turns_for_streams() -> None:
    async def scenario(folder: Path) -> int:
        client = Counting(ZmqLink(folder), Journal(), Metrics())
        with zmq.Context() as context, context.socket(zmq.PUSH) as push:
            push.connect(f"ipc://{folder}/frontend")
            for epoch in range(100):
                push.send(encode(EpochEnded(epoch, "lost", final=False)))
            receiving = asyncio.create_task(client.run())
            most = before = 0
            while client.handled < 100:
                await asyncio.sleep(0)
                most, before = max(most, client.handled - before), client.handled
            receiving.cancel()
        client.close()
        return most

    with tempfile.TemporaryDirectory(prefix="ep-") as folder:
        assert asyncio.run(scenario(Path(folder))) == 1
