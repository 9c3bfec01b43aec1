"""Requests with images among others while engines die and break, in a pass over images and in the midst of a prompt."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from ep_runtime.frontend.text.tokenizer import Tokenizer
from tests.support.chaos_faults import Fault, inject
from tests.support.chaos_images import POISON_COLOR, ImageJudge, image_chat, new_images, poisoned_chat
from tests.support.chaos_judge import judge_answers, whole
from tests.support.chaos_requests import MARKERS, Answer, Clients, Request, long_stream, mixed_request, send
from tests.support.chaos_server import ChaosServer, assert_nothing_leaks

COMMAND_TIMEOUT = 5.0
FLAGS = (
    f"--command-timeout={COMMAND_TIMEOUT:g}",
    "--handshake-timeout=20",
    "--max-model-len=384",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=64",  # a prompt with images takes several chunks
    "--max-image-tokens=256",  # four of the largest images
    "--digest-interval=2",
)
CLIENTS = 10
VOCAB = 290
CLOCK_TOKENS, MARKED_TOKENS = 60, 20
MARK = "!"
"""A text of one token, which is one of MARKERS."""

FEW = (
    Fault("corrupt", (0,), 8),
    Fault("kill in encode", (0,), 3),
    Fault("kill in prefill", (1,), 2),
    Fault("execute everywhere", (0, 1), 4, 0),
    Fault("kill", (0, 1), 12),
    Fault("close", (1,), 5),
    Fault("kill in prefill", (0,), 1),
    Fault("kill in encode", (1,), 6),
)
MANY = (
    Fault("execute", (1,), 3),
    Fault("kill in encode", (0, 2), 5),
    Fault("kill in prefill", (2,), 7),
    Fault("prepare everywhere", (0, 1, 2), 4, 0),
    Fault("kill", (1,), 9),
    Fault("corrupt", (2,), 6),
    Fault("kill in prefill", (0, 1), 2),
    Fault("execute everywhere", (0, 1, 2), 8, 0),
    Fault("kill", (0,), 4),
    Fault("prepare", (0,), 1),
    Fault("kill in encode", (1,), 10),
    Fault("execute late", (0,), 5),
    Fault("kill", (0, 1, 2), 11),
    Fault("stop", (2,), 3),
    Fault("kill in encode", (0,), 1),
    Fault("close", (1,), 6),
    Fault("kill in recovery", (1, 0), 2, 2),
)


def plan_wave(first: int, count: int, rng: random.Random) -> list[Request]:
    """The requests of a fault: a stream that is its clock, a long prompt of new images, and others, some with known images."""
    clock, marked = new_images(first, rng, 1, tokens=CLOCK_TOKENS), new_images(first + 1, rng, 3, tokens=MARKED_TOKENS, text=MARK)
    kinds = [image_chat(first + 2, rng), long_stream(first + 3, rng, VOCAB)]
    return [clock, marked, *kinds, *(_one(number, rng) for number in range(first + len(kinds) + 2, first + count))]


def _one(number: int, rng: random.Random) -> Request:
    return image_chat(number, rng) if number % 4 == 0 else mixed_request(number, rng, VOCAB)


def run_wave(server: ChaosServer, clients: Clients, wave: list[Request], fault: Fault) -> None:
    """Send a wave; do the fault when its clock has come far enough, with the new images under way where it concerns them."""
    clock, marked, *rest = wave
    come = threading.Event()
    sent = threading.Event()

    def send_marked() -> None:
        sent.set()
        clients.put([marked])

    clients.put([clock], lambda tokens: come.set() if tokens >= fault.after else None)
    clients.put(rest)
    assert come.wait(60), f"the clock of the wave of {fault} does not come to its token\n{server.log()[-6000:]}"
    marker = Tokenizer.load(server.model).encode(MARK, False)
    assert len(marker) == 1
    assert marker[0] in MARKERS
    inject(server, fault, command_timeout=COMMAND_TIMEOUT, marker=marker, send_marked=send_marked)
    if not sent.is_set():
        send_marked()


def go_through(server: ChaosServer, faults: tuple[Fault, ...], each: int) -> None:
    """Run all waves without faults and with them, and judge the answers.

    The marked requests run without faults at the end: their images are not to be known when a fault waits for their encoding.
    """
    rng = random.Random(31)
    waves = [plan_wave(each * at, each, rng) for at in range(len(faults))]
    reference = run_calmly(server, [request for clock, _, *rest in waves for request in (clock, *rest)])
    assert server.epoch() == 1

    clients = Clients(server.port, CLIENTS)
    epoch = 1
    for wave, fault in zip(waves, faults, strict=True):
        run_wave(server, clients, wave, fault)
        epoch += fault.epochs
        server.wait_epoch(epoch)
    answers = clients.join()
    reference |= run_calmly(server, [marked for _, marked, *_ in waves])
    requests = {request.number: request for wave in waves for request in wave}
    judge = ImageJudge(server.model)
    assert judge.judge_reference(requests, reference).tokens == len(faults) * (CLOCK_TOKENS + MARKED_TOKENS)
    judge_answers(judge, requests, answers, reference)
    assert server.epoch() == epoch
    assert_no_images_leak(server)


def run_calmly(server: ChaosServer, requests: list[Request]) -> dict[int, Answer]:
    """The answers without faults. The ranks are compared meanwhile, while rows of images are held."""
    ranks = range(server.world)
    clients = Clients(server.port, CLIENTS)
    with server.expect("digest", *ranks):
        server.arm("digest", *ranks)
        clients.put(requests)
        answers = clients.join()
    assert [line for request in requests for line in whole(request, answers[request.number])] == []
    assert [answer.error for answer in answers.values() if answer.error] == []
    return answers


def assert_no_images_leak(server: ChaosServer) -> None:
    """Nothing is held, decoded images included."""
    assert_nothing_leaks(server)
    assert server.metrics()["ep_image_bytes"] == 0


def lose_the_frontend(server: ChaosServer) -> None:
    """Its streams over images end with it; the next one serves the same, from the engines of the same epoch."""
    rng = random.Random(37)
    epoch, engines = server.epoch(), [server.engine(rank) for rank in range(server.world)]
    streams = [new_images(9000 + number, rng, 1, tokens=250) for number in range(4)]
    reference = send(server.port, streams[0])
    frontend = server.frontend()
    come = threading.Event()
    clients = Clients(server.port, len(streams))
    clients.put(streams[:1], lambda tokens: come.set() if tokens >= 3 else None)
    clients.put(streams[1:])
    assert come.wait(60)
    frontend.kill()
    answers = clients.join()
    assert answers[streams[0].number].broken
    # A connection that nobody had accepted is the next frontend's.
    assert all(answers[stream.number].broken or whole(stream, answers[stream.number]) == [] for stream in streams)
    server.wait("another frontend", lambda: server.epoch() == epoch)
    server.wait_ready()
    assert_no_images_leak(server)
    again = send(server.port, streams[0])
    assert [*whole(streams[0], again), *ImageJudge(server.model).same(streams[0], again, reference)] == []
    assert [server.engine(rank) for rank in range(server.world)] == engines
    assert server.epoch() == epoch


def test_images_among_others_while_engines_and_the_frontend_die(serve: Callable[..., ChaosServer]) -> None:
    server = serve("qwen3_vl_moe", "images", 2, *FLAGS, "--num-blocks=72", "--enable-prefix-caching")
    go_through(server, FEW, 7)
    lose_the_frontend(server)


@pytest.mark.slow
def test_images_of_a_hybrid_model_on_three_ranks_through_many_faults(serve: Callable[..., ChaosServer]) -> None:
    server = serve("qwen3_5_moe", "images", 3, *FLAGS, "--num-blocks=72", "--image-cache-bytes=65536")
    go_through(server, MANY, 12)
    lose_the_frontend(server)


def fail_alone(server: ChaosServer, how: str, epochs: int) -> None:
    """A request with an image at which the encoder fails gets an error, after so many epochs; others end as without it."""
    rng = random.Random(41)
    bystanders = [long_stream(0, rng, VOCAB), *(new_images(number, rng, number) for number in (1, 2)), image_chat(3, rng)]
    calm = Clients(server.port, len(bystanders))
    calm.put(bystanders)
    reference = calm.join()
    poisoned = poisoned_chat(4)
    before = server.epoch()
    server.arm("picture", 0, color=POISON_COLOR, how=how)
    clients = Clients(server.port, len(bystanders) + 1)
    clients.put([*bystanders[:2], poisoned, *bystanders[2:]])
    answers = clients.join()
    server.disarm("picture", 0)
    failed = answers.pop(poisoned.number)
    assert (failed.status, failed.samples, failed.broken) == (500, {}, "")
    assert ("alone" if epochs else "cannot be encoded") in failed.error
    judge_answers(ImageJudge(server.model), {request.number: request for request in bystanders}, answers, reference)
    assert not any(answer.error for answer in answers.values())
    server.wait_epoch(before + epochs)
    assert_no_images_leak(server)


EPOCHS = 3
"""What a request ends that breaks one rank, as in `test_poison`."""


def test_an_image_that_breaks_the_encoder_fails_its_request_alone(serve: Callable[..., ChaosServer]) -> None:
    server = serve("qwen3_5_moe", "images", 2, *FLAGS)
    fail_alone(server, "raise", 0)
    fail_alone(server, "crash", EPOCHS)


@pytest.mark.slow
def test_an_image_at_which_the_encoder_hangs_fails_its_request_alone(serve: Callable[..., ChaosServer]) -> None:
    fail_alone(serve("qwen3_vl_moe", "images", 2, *FLAGS), "hang", EPOCHS)
