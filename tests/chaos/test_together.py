"""Two things at once: every engine dies, the frontend dies with an engine, clients leave and SIGTERM comes during a recovery."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections.abc import Callable

from tests.support.chaos_judge import whole
from tests.support.chaos_requests import Answer, Clients, Request, long_stream
from tests.support.chaos_server import ChaosServer, assert_nothing_leaks

STREAMS = 6


def streams(tokens: int = 300) -> list[Request]:
    """Streams that are still open when every one of them has begun."""
    rng = random.Random(23)
    requests = [long_stream(number, rng, 390) for number in range(STREAMS)]
    for request in requests:
        request.body["max_tokens"] = tokens
    return requests


def run(server: ChaosServer, meanwhile: Callable[[], object], tokens: int = 300) -> dict[int, Answer]:
    """The answers to `streams`, while something is done that begins when the first has ten tokens."""
    come = threading.Event()
    clients = Clients(server.port, STREAMS)
    clients.put(streams(tokens), lambda come_to: come.set() if come_to >= 10 else None)
    assert come.wait(60)
    meanwhile()
    return clients.join()


def leave_while_recovering(server: ChaosServer) -> None:
    """Connections with open streams are cut right after a kill."""
    body = json.dumps({"prompt": [50, 60], "max_tokens": 300, "ignore_eos": True, "stream": True})
    responses = []
    for _ in range(STREAMS):
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        responses.append((connection, connection.getresponse()))
    server.kill(1)
    for connection, response in responses:
        response.close()
        connection.close()


def test_what_goes_wrong_together(serve: Callable[..., ChaosServer]) -> None:
    server = serve("qwen3_moe", "plain", 2, "--max-model-len=512", "--num-blocks=256")
    reference = run(server, lambda: None)
    everyone = run(server, lambda: server.kill(0, 1))
    assert everyone == reference
    server.wait_epoch(2)

    leave_while_recovering(server)
    server.wait_epoch(3)
    assert_nothing_leaks(server)

    def kill_both() -> None:
        server.frontend().kill()
        server.kill(1)

    lost = run(server, kill_both)
    assert all(answer.broken for answer in lost.values())
    server.wait_epoch(4)
    assert run(server, lambda: None) == reference
    assert_nothing_leaks(server)


def test_requests_end_when_sigterm_comes_during_a_recovery(serve: Callable[..., ChaosServer]) -> None:
    # Short answers and the longest drain: it holds a recovery, in which both engines may have to be started anew.
    tokens = 100
    server = serve("qwen3_moe", "plain", 2, "--max-model-len=512", "--num-blocks=256", "--drain-timeout=18")
    reference = run(server, lambda: None, tokens)

    def stop() -> None:
        server.kill(0, 1)
        server.wait("the end of the epoch", lambda: not server.is_ready())
        server.terminate()

    answers = run(server, stop, tokens)
    assert all(whole(request, answers[request.number]) == [] for request in streams(tokens))
    assert answers == reference
