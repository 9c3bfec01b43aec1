"""Readiness, epochs and replay, draining: the frontend's life around that of its engines."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ep_runtime.frontend.main import package_version
from protocol.messages import EpochReady, Recovered, SequenceUpdate
from tests.http.conftest import TEXT, Stack, metric, wait_metric
from tests.support.http_server import frontend_command, frontend_environment

USER = [{"role": "user", "content": "Hi"}]
MakeStack = Callable[..., Stack]
DRAINING = (503, "draining", "5")


def read_pieces(lines: Iterator[str], count: int | None = None) -> list[str]:
    """Contents of the next `count` deltas that have one; of all up to the end without a count."""
    pieces: list[str] = []
    for line in lines:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        assert "error" not in event, event
        for choice in event["choices"]:
            if choice["delta"].get("content"):
                pieces.append(choice["delta"]["content"])
        if len(pieces) == count:
            break
    return pieces


class Background(threading.Thread):
    """A plain request in a thread of its own; `result()` waits for the answer."""

    def __init__(self, send: Callable[..., httpx.Response], **fields: Any) -> None:
        super().__init__(daemon=True)
        self._send, self._fields = send, fields
        self.start()

    def run(self) -> None:
        self.answer = self._send(**self._fields)

    def result(self) -> httpx.Response:
        self.join(30)
        assert not self.is_alive()
        return self.answer


def poll_ready(stack: Stack, status: int) -> httpx.Response:
    """/ready until it answers with this status; what is being waited for is an event in another process."""
    deadline = time.monotonic() + 60
    while (answer := stack.http.get("/ready")).status_code != status:
        assert time.monotonic() < deadline, f"/ready stayed at {answer.status_code}: {answer.text}"
    return answer


def test_not_ready_then_ready_then_gone(make_stack: MakeStack) -> None:
    stack = make_stack()
    assert stack.http.get("/health").status_code == 200
    assert stack.http.get("/ready").status_code == 503
    refused = stack.chat()
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert stack.http.get("/v1/models").json()["data"][0]["max_model_len"] is None
    assert stack.server.out == []
    engine = stack.engine_of(4)
    stack.server.wait_line("out", "ready")
    assert stack.http.get("/ready").json() == {"status": "ready", "epoch": 4, "reason": None}
    engine.hold()
    waiting = Background(stack.chat)
    engine.submits(1)
    engine.stop("rank 1 was lost", final=True)
    failed = waiting.result()
    assert failed.status_code == 503
    assert "rank 1 was lost" in failed.json()["error"]["message"]
    assert "rank 1 was lost" in stack.http.get("/ready").json()["reason"]
    assert stack.chat().status_code == 503
    stack.server.terminate()
    assert stack.server.wait() == 0
    assert stack.server.out == ["ready"]


def test_a_stream_goes_on_in_the_next_epoch(make_stack: MakeStack) -> None:
    stack = make_stack()
    first = stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    first.hold()
    first.step(5)
    with stack.http.stream("POST", "/v1/chat/completions", json={"messages": USER, "stream": True}) as answer:
        lines = answer.iter_lines()
        before = read_pieces(lines, 5)
        first.stop("rank 1 was killed", announce=False)
        # The next engine's announcement alone tells that the epoch is over.
        second = stack.engine_of(2)
        after = read_pieces(lines)
    assert "".join(before + after) == TEXT
    assert second.submits(1)[0].generated == stack.tokenizer.encode(TEXT, False)[:5]


def test_epoch_change_in_the_middle(make_stack: MakeStack) -> None:
    stack = make_stack()
    first = stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    first.hold()
    whole = Background(stack.chat, seed=1, stop="capital")
    original = first.submits(1)[0]
    streamed = Background(lambda: stack.http.post("/v1/chat/completions", json={"messages": USER, "stream": True, "n": 2}))
    first.submits(3)
    first.step(4)
    wait_metric(stack, "ep_generated_tokens_total", lambda value: value == 12)
    first.stop("rank 1 was killed")
    assert "rank 1 was killed" in poll_ready(stack, 503).json()["reason"]
    # Accepted while there is no engine, and run after those that came before.
    late = Background(stack.chat, max_tokens=2)
    wait_metric(stack, "ep_journal_sequences", lambda value: value >= 4)
    second = stack.engine_of(2)
    submits = second.submits(4)
    tokens = stack.tokenizer.encode(TEXT, False)
    assert [submit.generated for submit in submits] == [tokens[:4]] * 3 + [[]]
    assert submits[0].request_id == original.request_id
    assert submits[0].sampling == original.sampling
    assert submits[0].prompt == original.prompt
    assert whole.result().json()["choices"][0]["message"]["content"] == TEXT[: TEXT.index("capital")]
    assert whole.result().json()["usage"]["completion_tokens"] < len(tokens)
    pieces = read_pieces(iter(streamed.result().text.splitlines()))
    assert len("".join(pieces)) == 2 * len(TEXT)
    assert late.result().json()["choices"][0]["finish_reason"] == "length"
    assert metric(stack, "ep_replayed_sequences_total") == 3
    assert metric(stack, "ep_epoch") == 2


def test_what_an_old_epoch_says_is_dropped(make_stack: MakeStack) -> None:
    stack = make_stack()
    old = stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    old.hold()
    waiting = Background(stack.chat)
    request_id = old.submits(1)[0].request_id
    new = stack.engine_of(2, held=True)
    new.submits(1)
    ghost = SequenceUpdate(request_id=request_id, tokens=[5], finish="stop")
    old.send(old.sequences.results([ghost], 9))
    old.send(EpochReady(1, 512, 400, 8, [], 16, 2, "eager", []))
    old.send_raw(b"\x92\x01\x80")
    old.send_raw(b"nonsense")
    for reason in ("epoch", "malformed"):
        wait_metric(stack, f'ep_dropped_results_total{{reason="{reason}"}}', lambda value: value == 2)
    new.release()
    assert waiting.result().json()["choices"][0]["message"]["content"] == TEXT


def test_grammar_is_replayed(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.output = '{"city": "Paris"}'
    first = stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    first.hold()
    waiting = Background(stack.chat, response_format={"type": "json_object"})
    first.submits(1)
    first.step(3)
    first.wait_for(lambda messages: True if sum(type(message).__name__ == "Mask" for message in messages) == 3 else None)
    mask = first.received[-1].mask
    first.stop("killed")
    second = stack.engine_of(2)
    submit = second.submits(1)[0]
    assert len(submit.generated) == 3
    assert submit.mask == mask
    assert json.loads(waiting.result().json()["choices"][0]["message"]["content"]) == {"city": "Paris"}


def test_drain_finishes_what_runs(make_stack: MakeStack) -> None:
    stack = make_stack()
    engine = stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    engine.hold()
    running = Background(stack.chat)
    engine.submits(1)
    stack.server.terminate()
    assert "draining" in poll_ready(stack, 503).json()["reason"]
    refused = stack.chat()
    assert (refused.status_code, refused.json()["error"]["code"], refused.headers["retry-after"]) == DRAINING
    assert refused.json()["error"]["message"] == "The server is shutting down"
    assert stack.http.get("/health").status_code == 200
    engine.release()
    assert running.result().json()["choices"][0]["message"]["content"] == TEXT
    stack.http.close()
    assert stack.server.wait() == 0


def test_drain_ends_after_its_time(make_stack: MakeStack) -> None:
    stack = make_stack(drain_seconds=0.2)
    engine = stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    engine.hold()
    running = Background(stack.chat)
    request_id = engine.submits(1)[0].request_id
    stack.server.terminate()
    cut = running.result()
    assert (cut.status_code, cut.json()["error"]["code"], cut.headers["retry-after"]) == DRAINING
    assert cut.json()["error"]["message"] == "The server is shutting down"
    engine.aborted(request_id)
    assert stack.server.wait() == 0


def test_a_silent_engine_and_a_stuck_rank_are_not_ready(make_stack: MakeStack) -> None:
    stack = make_stack(ready_bound_seconds=0.3)
    engine = stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    assert "no rank has moved past step -1" in poll_ready(stack, 503).json()["reason"]
    engine.report(10, [10, 10])
    poll_ready(stack, 200)
    # Traffic of every kind goes on, but rank 1 stays where it is.
    for step in range(11, 10_000):
        engine.report(step, [step, 10])
        engine.announce()
        engine.send(Recovered(1, {"total": 1.0}))
        answer = stack.http.get("/ready")
        if answer.status_code == 503:
            break
    assert "rank 1 has not moved past step 10" in answer.json()["reason"]
    assert int(answer.headers["retry-after"]) >= 1
    assert metric(stack, "ep_ready") == 0
    health = stack.http.get("/health")
    assert (health.status_code, health.json()["epoch"]) == (200, 1)
    assert "rank 1 has not moved past step 10" in health.json()["reason"]


BAD_SETTINGS = [
    {"port": 70000},
    {"tokenizer": "/nonexistent"},
    {"reasoning_parser": "psychic"},
    {"tool_call_parser": "psychic"},
    {"chat_template": "/nonexistent"},
    {"chat_template": "{% if %}"},
]


@pytest.mark.parametrize("config", BAD_SETTINGS, ids=str)
def test_bad_settings_end_with_status_2(model: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    path = tmp_path / "frontend.json"
    path.write_text(json.dumps({"model": str(model), "runtime_dir": "/tmp/x", "served_model_name": ["tiny"], **config}))
    ended = subprocess.run(
        frontend_command(path), capture_output=True, text=True, env=frontend_environment(), timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("frontend: ")
    # For the supervisor's last line: the same on one line.
    assert ended.stdout.startswith("refused: ")
    assert ended.stdout.count("\n") == 1
    assert ended.stderr.splitlines()[-1].removeprefix("frontend: ") in ended.stdout
    assert "Traceback" not in ended.stderr


def test_the_process_imports_no_torch() -> None:
    code = "import sys, ep_runtime.frontend.main; print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    command = [sys.executable, "-P", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, env=frontend_environment(), check=True).stdout == "[]\n"


def test_health_answers_balancers_under_all_names(stack: Stack) -> None:
    whole = stack.http.get("/health")
    for answer in (stack.http.get("/ping"), stack.http.post("/ping"), stack.http.post("/ping", content=b"x")):
        assert (answer.status_code, answer.json()) == (200, whole.json())
    for path in ("/health", "/ready", "/ping"):
        head = stack.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == stack.http.get(path).headers["content-length"]
    assert stack.http.get("/version").json() == {"version": package_version()}
