"""A standby is killed while its engine serves: another stands by, and the recovery that follows waits for no start."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable

from tests.support.chaos_requests import Clients, long_stream, send
from tests.support.chaos_server import ChaosServer, assert_nothing_leaks

MOST_IMPORT_SECONDS = 0.5
"""From a standby's promotion until it reads its configuration, on a busy machine; importing takes seconds."""


def test_a_killed_standby_costs_the_next_recovery_nothing(serve: Callable[..., ChaosServer]) -> None:
    server = serve("qwen3_moe", "plain", 2, "--max-model-len=512", "--num-blocks=256")
    engine, first = server.engine(1), server.stood(1, 2)
    assert first != engine
    os.kill(first, signal.SIGKILL)
    second = server.stood(1, 3)
    assert second not in (first, engine)
    assert server.epoch() == 1
    lines = [line for line in server.log().splitlines() if " WARNING " in line]
    assert len(lines) == 1, lines
    assert lines[0].endswith(f"rank 1: its standby, process {first}, ended: killed by SIGKILL; another starts in 0.5 s")

    stream = long_stream(0, random.Random(31), 390)
    reference = send(server.port, stream)
    come = threading.Event()
    clients = Clients(server.port, 1)
    clients.put([stream], lambda tokens: come.set() if tokens >= 5 else None)
    assert come.wait(60)
    server.kill(1)
    (answer,) = clients.join().values()
    assert answer.samples == reference.samples
    server.wait_epoch(2)
    assert server.engine(1) == second
    seconds = server.metrics()
    assert seconds['ep_last_recovery_seconds{phase="spawn"}'] == 0
    assert seconds['ep_last_recovery_seconds{phase="import"}'] < MOST_IMPORT_SECONDS
    server.stood(1, 4)
    assert_nothing_leaks(server)
