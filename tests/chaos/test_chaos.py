"""Requests of every kind while engines are killed, stopped and broken: nothing is lost, and health says the truth."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from tests.support.chaos_faults import UNREADY_SECONDS, Fault, inject, plan_faults
from tests.support.chaos_judge import Judge, judge_answers, judge_reference, whole
from tests.support.chaos_requests import MARKERS, Clients, Request, long_stream, mixed_request
from tests.support.chaos_server import ChaosServer, assert_nothing_leaks
from tests.support.chaos_watch import Watch

SEED = 3
REQUESTS = 200
CLIENTS = 12
COMMAND_TIMEOUT = 5.0
FLAGS = (
    f"--command-timeout={COMMAND_TIMEOUT:g}",
    "--handshake-timeout=20",
    "--max-model-len=128",
    "--max-num-seqs=8",
    "--num-blocks=24",  # fewer than eight sequences can need: some are preempted
    "--digest-interval=16",
)
VOCAB = 390


def plan_waves(rng: random.Random, faults: int) -> list[list[Request]]:
    """The requests in waves, one a fault. The first of each is a long stream, the second is marked for faults everywhere."""
    waves = []
    for wave in range(faults):
        numbers = range(REQUESTS * wave // faults, REQUESTS * (wave + 1) // faults)
        first, second, *rest = numbers
        marked = long_stream(second, rng, VOCAB)
        marked.body["prompt"][0] = MARKERS[wave % len(MARKERS)]
        waves.append([long_stream(first, rng, VOCAB), marked, *(mixed_request(number, rng, VOCAB) for number in rest)])
    return waves


def run_wave(server: ChaosServer, clients: Clients, wave: list[Request], fault: Fault) -> float:
    """Send a wave, do the fault when its long stream has come far enough, return as `inject` does."""
    clock, marked, *rest = wave
    come = threading.Event()
    clients.put([clock], lambda tokens: come.set() if tokens >= fault.after else None)
    everywhere = fault.kind.endswith("everywhere")
    clients.put(rest if everywhere else [marked, *rest])
    assert come.wait(60), f"the long stream of the wave of {fault} does not come to its token"
    marker = marked.body["prompt"][:1]
    return inject(server, fault, command_timeout=COMMAND_TIMEOUT, marker=marker, send_marked=lambda: clients.put([marked]))


def test_every_request_ends_once_with_the_tokens_that_it_would_have_had(serve: Callable[..., ChaosServer]) -> None:
    rng = random.Random(SEED)
    faults = plan_faults(rng)
    waves = plan_waves(rng, len(faults))
    requests = {request.number: request for wave in waves for request in wave}
    server = serve("qwen3_moe", "plain", 4, *FLAGS)

    calm = Clients(server.port, CLIENTS)
    calm.put(requests.values())
    reference = calm.join()
    assert [line for number, answer in reference.items() for line in whole(requests[number], answer)] == []
    assert [answer.error for answer in reference.values() if answer.error] == []
    metrics, frontend = server.metrics(), server.frontend()
    assert (metrics["ep_epoch"], metrics["ep_epochs_ended_total"]) == (1, 0)
    assert metrics["ep_preemptions_total"] > 0
    assert judge_reference(server.model, requests, reference).tokens > 500

    clients = Clients(server.port, CLIENTS)
    epoch = 1
    lies = []
    with Watch(server.url) as watch:
        for wave, fault in zip(waves, faults, strict=True):
            begun = time.monotonic()
            since = run_wave(server, clients, wave, fault)
            server.wait_epoch(epoch + fault.epochs)
            print(f"{fault}: epoch {epoch + fault.epochs} after {time.monotonic() - begun:.2f} s", flush=True)
            if fault.epochs:
                since += watch.stalled(since - UNREADY_SECONDS, since)
                lies += [(fault, look) for look in watch.untruthful(epoch, since)]
            epoch += fault.epochs
        answers = clients.join()
    judge_answers(Judge(server.model), requests, answers, reference)
    assert lies == []
    assert {look.health for look in watch.looks} == {200}
    metrics = server.metrics()
    assert metrics["ep_epoch"] == 1 + sum(fault.epochs for fault in faults)
    failures = sum(fault.epochs > 0 for fault in faults)  # an epoch that never formed is not the end of one
    assert metrics["ep_epochs_ended_total"] == metrics["ep_recoveries_total"] == failures
    assert metrics["ep_replayed_sequences_total"] > len(faults)
    assert server.frontend().pid == frontend.pid
    assert_nothing_leaks(server)
