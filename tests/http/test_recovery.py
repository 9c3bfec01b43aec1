"""Epochs that end, as the real process sees them: what is told, what waits, who gets an error, and what is counted."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest
import zmq

from protocol.codec import encode
from protocol.messages import EpochEnded, Recovered, SequenceUpdate, ToFrontend
from tests.http.conftest import TEXT, Stack, metric, wait_metric
from tests.http.test_disconnect import open_request
from tests.http.test_lifecycle import USER, Background, MakeStack, poll_ready, read_pieces


def ready_stack(make_stack: MakeStack, epoch: int = 1, **config: Any) -> Stack:
    """A frontend with the held engine of an epoch."""
    stack = make_stack(**config)
    stack.engine_of(epoch, held=True)
    stack.server.wait_line("out", "ready")
    return stack


def tell(stack: Stack, message: ToFrontend) -> None:
    """Say something as the coordinator does, from a socket of its own."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"ipc://{stack.folder}/frontend")
        push.send(encode(message))


def wait_reason(stack: Stack, words: str) -> None:
    """Until /ready gives this reason; what is waited for is an event in another process."""
    deadline = time.monotonic() + 60
    while words not in ((answer := stack.http.get("/ready")).json()["reason"] or ""):
        assert time.monotonic() < deadline, f"/ready never said {words!r}: {answer.text}"


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_request_that_ran_alone_gets_the_error(make_stack: MakeStack, stream: bool) -> None:
    stack = ready_stack(make_stack)
    engine = stack.engine
    guilty = Background(lambda: stack.chat(n=2, stream=stream))
    name = engine.submits(2)[1].request_id
    others = [Background(stack.chat) for _ in range(2)]
    engine.submits(4)
    engine.step(2)
    wait_metric(stack, "ep_generated_tokens_total", lambda value: value == 8)
    # A survivor's word comes first and accuses nobody; then the cause is known, and is told more than once.
    engine.send(EpochEnded(1, "link to rank 1 lost", False))
    engine.send(EpochEnded(1, "rank 1 died of signal 11", False, suspicious=True, alone=name))
    engine.send(EpochEnded(1, "rank 1 died of signal 11", False, suspicious=True, alone=name))
    failed = guilty.result()
    if stream:
        events = [line for line in failed.text.splitlines() if line]
        assert events[-1] == "data: [DONE]"
        message = json.loads(events[-2].removeprefix("data: "))["error"]["message"]
    else:
        assert failed.status_code == 500
        message = failed.json()["error"]["message"]
    assert "alone" in message
    assert "rank 1 died of signal 11" in message
    second = stack.engine_of(2)
    assert [submit.suspicions for submit in second.submits(2)] == [1, 1]
    for other in others:
        assert other.result().json()["choices"][0]["message"]["content"] == TEXT
    assert len(second.submits(2)) == 2
    assert metric(stack, "ep_epochs_ended_total") == 1


@pytest.mark.parametrize(
    ("fields", "finished"), [({"suspicious": False}, True), ({"suspicious": True, "epoch": 7}, True), ({"suspicious": True}, False)]
)
def test_who_ran_alone_matters_only_with_suspicion_and_in_its_epoch(
    make_stack: MakeStack, fields: dict[str, Any], finished: bool
) -> None:
    stack = ready_stack(make_stack)
    running = Background(stack.chat)
    name = stack.engine.submits(1)[0].request_id
    stack.engine.stop(announce=False)
    tell(stack, EpochEnded(**{"epoch": 1, "reason": "lost", "final": False, "alone": name, **fields}))
    poll_ready(stack, 503)
    stack.engine_of(8)
    assert (running.result().status_code == 200) == finished


def test_the_word_of_who_ran_alone_may_come_late(make_stack: MakeStack) -> None:
    stack = ready_stack(make_stack)
    running, other = Background(stack.chat), Background(stack.chat)
    name = stack.engine.submits(2)[0].request_id
    stack.engine.stop("link lost")
    second = stack.engine_of(2, held=True)
    second.submits(2)
    second.send(EpochEnded(1, "killed by a request", False, suspicious=True, alone=name))
    second.aborted(name)
    assert stack.http.get("/ready").status_code == 200
    second.release()
    statuses = sorted(one.result().status_code for one in (running, other))
    assert statuses == [200, 500]


def test_the_end_of_an_epoch_is_told_at_once_and_as_it_is_known(make_stack: MakeStack) -> None:
    stack = ready_stack(make_stack)
    engine = stack.engine
    assert stack.http.get("/health").json() == {"status": "ok", "epoch": 1, "reason": None}
    running = Background(stack.chat)
    name = engine.submits(1)[0].request_id
    engine.step(1)
    wait_metric(stack, "ep_generated_tokens_total", lambda value: value == 1)
    assert metric(stack, "ep_running_sequences") == 1
    engine.send(EpochEnded(1, "link lost", False))
    late = [SequenceUpdate(name, [5]), SequenceUpdate(name, [], finish="stop")]
    for update in late:
        engine.send(engine.sequences.results([update]))
    engine.announce()
    wait_metric(stack, 'ep_dropped_results_total{reason="epoch"}', lambda value: value == 3)
    answer = stack.http.get("/ready")
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json() == {"status": "not ready", "epoch": None, "reason": "recovering: link lost"}
    assert stack.http.get("/health").json() == {"status": "ok", "epoch": None, "reason": "recovering: link lost"}
    assert "ep_running_sequences " not in stack.http.get("/metrics").text
    engine.stop("rank 2 was killed")
    wait_reason(stack, "recovering: rank 2 was killed")
    # An epoch that never became ready ends, too.
    tell(stack, EpochEnded(2, "rank 2 does not load", False))
    wait_reason(stack, "recovering: rank 2 does not load")
    third = stack.engine_of(3)
    assert running.result().json()["choices"][0]["message"]["content"] == TEXT
    assert third.submits(1)[0].generated == stack.tokenizer.encode(TEXT, False)[:1]
    assert stack.http.get("/ready").json() == {"status": "ready", "epoch": 3, "reason": None}
    assert metric(stack, "ep_epochs_ended_total") == 1


def test_a_frontend_that_starts_between_two_epochs(make_stack: MakeStack) -> None:
    stack = make_stack()
    tell(stack, EpochEnded(5, "rank 1 loads", False))
    wait_reason(stack, "starting: rank 1 loads")
    refused = stack.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert "rank 1 loads" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    # What the ended epoch's engine had still to say is too late.
    old = stack.engine_of(5)
    wait_metric(stack, 'ep_dropped_results_total{reason="epoch"}', lambda value: value == 1)
    assert stack.http.get("/ready").status_code == 503
    old.stop(announce=False)
    stack.engine_of(6)
    stack.server.wait_line("out", "ready")
    assert stack.chat().status_code == 200


def test_recovery_is_counted_by_phase(make_stack: MakeStack) -> None:
    stack = ready_stack(make_stack)
    assert metric(stack, "ep_recoveries_total") == 0
    assert metric(stack, 'ep_recovery_seconds_total{phase="replay"}') == 0
    running = [Background(stack.chat) for _ in range(2)]
    prompt = len(stack.engine.submits(2)[0].prompt)
    stack.engine.step(3)
    wait_metric(stack, "ep_generated_tokens_total", lambda value: value == 6)
    stack.engine.stop("killed")
    second = stack.engine_of(2, held=True)
    second.send(Recovered(2, {"leave": 0.25, "spawn": 0.5, "load": 1.5, "rendezvous": 0.125, "total": 2.5}))
    wait_metric(stack, "ep_recoveries_total", lambda value: value == 1)
    second.submits(2)
    assert metric(stack, 'ep_recovery_seconds_total{phase="replay"}') == 0
    second.step(1)
    wait_metric(stack, 'ep_recovery_seconds_total{phase="replay"}', lambda value: value > 0)
    replay = metric(stack, 'ep_recovery_seconds_total{phase="replay"}')
    assert metric(stack, 'ep_last_recovery_seconds{phase="replay"}') == replay
    assert metric(stack, "ep_replayed_sequences_total") == 2
    assert metric(stack, "ep_replayed_tokens_total") == 2 * (prompt + 3)
    second.send(Recovered(3, {"leave": 0.5, "total": 1.0}))
    wait_metric(stack, "ep_recoveries_total", lambda value: value == 2)
    for phase, last, total in (("leave", 0.5, 0.75), ("load", 0.0, 1.5), ("total", 1.0, 3.5), ("import", 0.0, 0.0)):
        assert metric(stack, f'ep_last_recovery_seconds{{phase="{phase}"}}') == last
        assert metric(stack, f'ep_recovery_seconds_total{{phase="{phase}"}}') == total
    second.release()
    assert [one.result().status_code for one in running] == [200, 200]


def test_during_recovery_requests_wait_and_the_queue_is_bounded(make_stack: MakeStack) -> None:
    stack = ready_stack(make_stack, max_queue=0)
    stack.engine.stop("killed")
    poll_ready(stack, 503)
    waiting = [Background(stack.chat, max_tokens=1) for _ in range(7)]
    gone = open_request(stack, stream=True)
    wait_metric(stack, "ep_journal_sequences", lambda value: value == 8)
    refused = stack.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    gone.close()
    wait_metric(stack, "ep_journal_sequences", lambda value: value == 7)
    waiting.append(Background(stack.chat, max_tokens=1))
    wait_metric(stack, "ep_journal_sequences", lambda value: value == 8)
    second = stack.engine_of(2)
    assert [one.result().status_code for one in waiting] == [200] * 8
    assert len(second.submits(8)) == 8
    assert metric(stack, "ep_replayed_sequences_total") == 0


@pytest.mark.parametrize("back", [True, False])
def test_draining_while_no_epoch_runs(make_stack: MakeStack, back: bool) -> None:
    stack = ready_stack(make_stack, drain_seconds=30.0 if back else 0.3)
    stack.engine.step(4)
    with stack.http.stream("POST", "/v1/chat/completions", json={"messages": USER, "stream": True}) as answer:
        lines = answer.iter_lines()
        before = read_pieces(lines, 4)
        stack.engine.stop("killed")
        stack.server.wait_line("err", "ended (to be continued)")
        stack.server.terminate()
        stack.server.wait_line("err", "draining 1 sequences")
        if back:
            stack.engine_of(2)
            assert "".join(before + read_pieces(lines)) == TEXT
        else:
            rest = [line for line in lines if line]
            error = json.loads(rest[-2].removeprefix("data: "))["error"]
            assert (error["message"], error["code"]) == ("The server is shutting down", "draining")
            assert rest[-1] == "data: [DONE]"
    stack.http.close()
    assert stack.server.wait() == 0


def test_a_new_frontend_ends_what_the_old_one_left_even_what_waits(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.output = '{"city": "Paris"}'
    engine = stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    engine.hold()
    # A waiting one, and one whose next mask nobody will send: neither gives any update.
    socks = [open_request(stack, stream=True), open_request(stack, response_format={"type": "json_object"})]
    engine.submits(2)
    prefix = engine.takeovers[0].prefix
    assert all(submit.request_id.startswith(prefix) for submit in engine.submits(2))
    stack.kill_and_restart()
    for sock in socks:
        sock.close()
    engine.announce()
    stack.server.wait_line("out", "ready")
    engine.taken_over(2)
    assert engine.takeovers[1].prefix != prefix
    engine.clear()
    engine.release()
    assert stack.chat().json()["choices"][0]["message"]["content"] == stack.output
    assert engine.running == 0
    assert metric(stack, 'ep_dropped_results_total{reason="ended"}') == 2


def test_a_socket_that_outlives_its_frontend(make_stack: MakeStack) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        port = listener.getsockname()[1]
        stack = make_stack(listen_fd=listener.fileno())
        assert stack.url == f"http://127.0.0.1:{port}"
        engine = stack.engine_of(1)
        stack.server.wait_line("out", "ready")
        assert stack.chat().status_code == 200
        stack.server.close()
        # Nobody serves now. A client that comes all the same waits, and is answered when it can be.
        early = [Background(lambda: stack.client().completions.create(model="tiny", prompt="The")) for _ in range(3)]
        stack.kill_and_restart()
        engine.announce()
        assert [one.result().choices[0].finish_reason for one in early] == ["length"] * 3
        stack.http.close()
        stack.server.terminate()
        assert stack.server.wait() == 0
        assert listener.getsockname()[1] == port
        with socket.create_connection(("127.0.0.1", port), timeout=30):
            pass
