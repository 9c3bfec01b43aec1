"""A prefill that takes long is no failure: /ready stays 200 and nothing recovers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.support.chaos_requests import Clients, long_stream
from tests.support.chaos_server import ChaosServer, assert_nothing_leaks
from tests.support.chaos_watch import Watch


def ready_through_a_prefill_of(server: ChaosServer, seconds: float) -> None:
    """Make one rank sleep in a prefill among other requests, and look at /ready all the time."""
    rng = random.Random(7)
    requests = [long_stream(number, rng, 390) for number in range(4)]
    calm = Clients(server.port, 4)
    calm.put(requests)
    reference = calm.join()
    clients = Clients(server.port, 4)
    with Watch(server.url) as watch:
        begun = time.monotonic()
        with server.expect("awake", 1):
            server.arm("slow", 1, seconds=seconds)
            clients.put(requests)
        ended = time.monotonic()
        answers = clients.join()
    assert ended - begun >= seconds
    assert watch.unready(begun, ended) == []
    assert watch.gap(begun, ended) < seconds / 3
    assert {number: answer.samples for number, answer in answers.items()} == {
        number: answer.samples for number, answer in reference.items()
    }
    assert server.epoch() == 1
    assert_nothing_leaks(server)


def test_ready_through_a_prefill_that_nearly_takes_what_a_command_may(serve: Callable[..., ChaosServer]) -> None:
    ready_through_a_prefill_of(serve("qwen3_moe", "plain", 2, "--command-timeout=14"), 11.0)


@pytest.mark.slow
def test_ready_through_a_prefill_of_a_minute(serve: Callable[..., ChaosServer]) -> None:
    ready_through_a_prefill_of(serve("qwen3_moe", "plain", 2), 60.0)
