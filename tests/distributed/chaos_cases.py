"""Many requests of every kind at once, with preemptions, aborts and failed commands: what ranks run in the chaos tests."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ep_runtime.engine.executor import Executor
from model.base import Communicator
from model.batch import ForwardBatch, ForwardOutput
from model.state.registry import StateRegistry
from protocol.commands import Alloc
from protocol.errors import EpCommandFailed
from protocol.frame import Frame
from protocol.messages import Abort, Mask, SamplingParams, SequenceUpdate, Submit
from protocol.slots import Change, SlotTable
from tests.support.checkpoints import VOCAB, prompt
from tests.support.engine import Driver, head_of
from tests.support.rank_context import RankContext


def grammar_mask(prompt_ids: list[int], generated: list[int]) -> bytes:
    """A bitmask that depends on every token so far, as a grammar's does."""
    state = random.Random(repr((prompt_ids, generated)))
    words = np.zeros(-(-VOCAB // 32), dtype="<u4")
    for token in state.sample(range(VOCAB), 20):
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.tobytes()


def random_request(rng: random.Random, number: int) -> dict[str, Any]:
    """One request: `prompt`, `group` and sampling parameters. Many share a prefix; lengths sit on and beside block bounds."""
    length = rng.choice([1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 40, 64])
    start = prompt(32, seed=rng.randrange(2))[: rng.choice([0, 8, 16, 20, 32])]
    request: dict[str, Any] = {
        "prompt": (start + prompt(64, seed=100 + number))[:length],
        "max_tokens": rng.choice([0, 1, 2, 8, 13, 20, 24]),
        "seed": rng.randrange(1 << 60),
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.6:
        request |= {"temperature": rng.choice([0.5, 1.0, 1.7]), "top_p": rng.choice([1.0, 0.8]), "top_k": rng.choice([0, 5, 40])}
    if rng.random() < 0.4:
        request |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6}
    if rng.random() < 0.3:
        request |= {"logit_bias": {rng.randrange(VOCAB): rng.choice([-100.0, 3.0]) for _ in range(3)}}
    if rng.random() < 0.4:
        request |= {"stop_token_ids": rng.sample(range(VOCAB), 30), "min_tokens": rng.choice([0, 0, 3])}
    if rng.random() < 0.3:
        request |= {"logprobs": rng.choice([0, 2])}
    if rng.random() < 0.3:
        request |= {"prompt_logprobs": rng.choice([0, 2])}
    if rng.random() < 0.25:
        request |= {"grammar": True}
    return request


@dataclass
class Chaos:
    """Breaks things as `rng` says: forwards fail alike on every rank, ALLOCs are voted down by one rank."""

    rng: random.Random
    rank: int
    forward_failures: float = 0.0
    alloc_failures: float = 0.0
    armed: bool = False
    failed: int = field(default=0)

    def arrange(self, executor: Executor) -> None:
        """Wrap what it breaks. Every rank draws the same numbers, one a command."""
        forward, prepare = executor._model.forward, executor.prepare
        late = random.Random(7)

        def failing_forward(batch: ForwardBatch, state: StateRegistry, comm: Communicator) -> ForwardOutput:
            draw = self.rng.random()
            if draw < self.forward_failures / 2:
                raise ValueError("before the forward")
            output = forward(batch, state, comm)
            if draw < self.forward_failures:
                raise ValueError("after the forward")
            return output

        def failing_prepare(frame: Frame, slots: SlotTable) -> Change:
            if isinstance(frame.command, Alloc) and late.random() < self.alloc_failures and self.rank == executor.comm.world - 1:
                raise EpCommandFailed("no room, says chaos")
            return prepare(frame, slots)

        executor._model.forward = failing_forward  # type: ignore[method-assign]
        executor.prepare = failing_prepare  # type: ignore[method-assign]


def submit(driver: Driver, request_id: str, group: str, request: dict[str, Any]) -> None:
    """Submit a request of `random_request`, its first mask with it."""
    params = {"temperature": 0.0, **{k: v for k, v in request.items() if k != "prompt"}}
    mask = grammar_mask(request["prompt"], []) if request.get("grammar") else b""
    driver.send(Submit(request_id, group, list(request["prompt"]), SamplingParams(**params), mask=mask))


def serve_masks(driver: Driver, requests: dict[str, dict[str, Any]]) -> None:
    """Answer every token of a grammar request with the next mask, as the frontend does."""

    def answer(update: SequenceUpdate) -> None:
        request = requests[update.request_id]
        if request.get("grammar") and update.finish is None and update.tokens:
            tokens = driver.answers[update.request_id].tokens
            driver.send(Mask(update.request_id, len(tokens), grammar_mask(request["prompt"], tokens)))

    driver.on_update = answer


def alone(ctx: RankContext, *, folder: str, requests: dict[str, dict[str, Any]], **settings: Any) -> Any:
    """Each request by itself, in order: the answers that company must not change."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        serve_masks(driver, requests)
        for request_id, request in requests.items():
            submit(driver, request_id, request_id, request)
            driver.finish()
        return {request_id: asdict(answer) for request_id, answer in driver.answers.items()}


def together(
    ctx: RankContext,
    *,
    folder: str,
    requests: dict[str, dict[str, Any]],
    seed: int,
    aborts: float,
    forward_failures: float,
    alloc_failures: float,
    **settings: Any,
) -> Any:
    """All requests, arriving and aborted at random moments: their answers, and what happened."""
    chaos = Chaos(random.Random(seed), ctx.rank, forward_failures, alloc_failures)
    rng = random.Random(seed + 1)
    with head_of(ctx, folder, arrange=chaos.arrange, **settings) as driver:
        if driver is None:
            return None
        serve_masks(driver, requests)
        waiting = list(requests)
        turns = 0
        while waiting or any(answer.finish is None for answer in driver.answers.values()):
            while waiting and rng.random() < 0.8:
                request_id = waiting.pop(0)
                submit(driver, request_id, request_id.split("-")[0], requests[request_id])
            live = [request_id for request_id, answer in driver.answers.items() if answer.finish is None]
            if live and rng.random() < aborts:
                driver.send(Abort([rng.choice(live)]))
            driver.turn()
            driver.sampler.check_integrity()
            turns += 1
            assert turns < 5000, "requests do not end"
        driver.finish()
        driver.sampler.check_integrity()
        stats = driver.scheduler.stats()
        return {
            "answers": {request_id: asdict(answer) for request_id, answer in driver.answers.items()},
            "preemptions": stats.preemptions,
            "cached": stats.cached_tokens,
        }
