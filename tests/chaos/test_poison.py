"""A request that breaks whatever runs it is run alone in the end, and fails alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tests.support.chaos_requests import MARKERS, Clients, Request, long_stream
from tests.support.chaos_server import ChaosServer, assert_nothing_leaks

POISON = [MARKERS[0], MARKERS[1], MARKERS[2]]
BYSTANDERS = 4
POISONED = 99
ONE_SIDED = (("raise", 1), ("crash", 1), ("crash", 0), ("hang", 1))
EPOCHS = 3
"""What a request ends that breaks one rank: two epochs among others, and one in which it is alone."""


def fail_alone_among_others(server: ChaosServer, how: str, *ranks: int) -> None:
    """The poisoned request gets an error that says that it was alone; what runs beside it ends as without it."""
    rng = random.Random(5)
    bystanders = [long_stream(number, rng, 390) for number in range(BYSTANDERS)]
    calm = Clients(server.port, BYSTANDERS)
    calm.put(bystanders)
    reference = calm.join()
    server.arm("poison", *ranks, marker=POISON, how=how)
    clients = Clients(server.port, BYSTANDERS + 1)
    clients.put(bystanders)
    clients.put([Request(POISONED, "/v1/completions", {"prompt": [*POISON, 50], "max_tokens": 8, "temperature": 0.0})])
    answers = clients.join()
    server.disarm("poison", *ranks)
    poisoned = answers.pop(POISONED)
    assert (poisoned.status, poisoned.samples, poisoned.broken) == (500, {}, "")
    assert "alone" in poisoned.error
    assert not any(answer.error or answer.broken for answer in answers.values())
    assert {n: answer.samples for n, answer in answers.items()} == {n: answer.samples for n, answer in reference.items()}


def is_past(server: ChaosServer, epoch: int) -> bool:
    """Whether the server is ready in this epoch or a later one."""
    return server.epoch() >= epoch and server.is_ready()


def test_a_request_that_breaks_what_runs_it_fails_alone(serve: Callable[..., ChaosServer]) -> None:
    """Everywhere alike, in the same epoch; on one rank, after two epochs among others and one in which it is alone."""
    server = serve("qwen3_moe", "plain", 2, "--command-timeout=5")
    fail_alone_among_others(server, "raise", 0, 1)
    assert server.epoch() == 1
    for how, rank in ONE_SIDED:
        epoch, before = server.epoch(), server.happened("poison", rank)
        fail_alone_among_others(server, how, rank)
        broken = server.happened("poison", rank) - before
        assert broken <= EPOCHS
        server.wait("an epoch behind the last broken one", partial(is_past, server, epoch + broken))
        ended = server.epoch() - epoch
        # A machine that is too busy for the command's deadline ends epochs, too, and each makes whatever ran a suspect.
        assert broken == EPOCHS or ended > broken > 0
    assert_nothing_leaks(server)
