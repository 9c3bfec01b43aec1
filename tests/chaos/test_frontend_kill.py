"""The frontend is killed under load: its connections end, the engines go on in their epoch, another one serves the same port."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import psutil

from tests.support.chaos_requests import Clients, long_stream, send
from tests.support.chaos_server import ChaosServer, assert_nothing_leaks

STREAMS = 6


def test_a_killed_frontend_takes_its_connections_with_it_and_nothing_else(serve: Callable[..., ChaosServer]) -> None:
    server = serve("qwen3_moe", "plain", 2, "--max-model-len=512", "--num-blocks=256")
    engines = [server.engine(rank) for rank in range(2)]
    frontend = server.frontend()
    rng = random.Random(11)
    streams = [long_stream(number, rng, 390) for number in range(STREAMS)]
    for stream in streams:
        stream.body["max_tokens"] = 400
    reference = send(server.port, streams[0])
    clients = Clients(server.port, STREAMS)
    come = threading.Barrier(STREAMS + 1)
    for stream in streams:
        told = threading.Event()
        clients.put([stream], lambda tokens, told=told: _once(told, come) if tokens >= 5 else None)
    come.wait(60)
    frontend.kill()
    answers = clients.join()
    assert all(answer.broken for answer in answers.values())
    server.wait("another frontend", lambda: server.epoch() == 1)
    server.wait_ready()
    assert server.frontend().pid != frontend.pid
    assert_nothing_leaks(server)
    again = send(server.port, streams[0])
    assert again.samples == reference.samples
    assert [server.engine(rank) for rank in range(2)] == engines
    assert all(psutil.pid_exists(engine) for engine in engines)
    assert server.epoch() == 1


def _once(told: threading.Event, come: threading.Barrier) -> None:
    if not told.is_set():
        told.set()
        come.wait(60)
