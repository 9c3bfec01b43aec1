"""Recurrent state is lost with its rank and comes back with the replay: kills and a failed step under a hybrid model."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from tests.support.chaos_judge import Judge, judge_reference, whole
from tests.support.chaos_requests import Clients, long_stream, mixed_request
from tests.support.chaos_server import ChaosServer, assert_nothing_leaks

REQUESTS = 32
STEPS = (("kill", (1,)), ("execute", (1,)), ("kill", (0,)), ("kill", (0, 1)))


def test_a_hybrid_model_goes_on_after_kills_with_the_same_tokens(serve: Callable[..., ChaosServer]) -> None:
    rng = random.Random(17)
    server = serve("qwen3_next", "plain", 2, "--max-num-seqs=8", "--max-model-len=128", "--digest-interval=8")
    each = REQUESTS // len(STEPS)
    waves = [
        [long_stream(at, rng, 390), *(mixed_request(number, rng, 390) for number in range(at + 1, at + each))]
        for at in range(0, REQUESTS, each)
    ]
    requests = {request.number: request for wave in waves for request in wave}
    calm = Clients(server.port, 8)
    calm.put(requests.values())
    reference = calm.join()
    assert judge_reference(server.model, requests, reference).tokens > 100

    clients = Clients(server.port, 8)
    for epoch, (wave, (kind, ranks)) in enumerate(zip(waves, STEPS, strict=True), start=1):
        come = threading.Event()
        clients.put(wave[:1], lambda tokens, come=come: come.set() if tokens >= 10 else None)
        clients.put(wave[1:])
        assert come.wait(60)
        if kind == "kill":
            server.kill(*ranks)
        else:
            with server.expect(kind, *ranks):
                server.arm(kind, *ranks)
        server.wait_epoch(epoch + 1)
    answers = clients.join()
    judge = Judge(server.model)
    for number, answer in sorted(answers.items()):
        assert whole(requests[number], answer) == []
        assert answer.error == ""
        assert judge.same(requests[number], answer, reference[number]) == []
    assert server.epoch() == len(STEPS) + 1
    assert_nothing_leaks(server)
