"""What ranks run in the tests of failure scopes: failed batches, suspects, and what the progress page says meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from ep_runtime.engine.executor import Choose, Executor
from model.base import Communicator
from model.batch import ForwardBatch, ForwardOutput
from model.state.registry import StateRegistry
from protocol.commands import Forward
from protocol.errors import EpLinkLost
from protocol.frame import Frame
from protocol.messages import SamplingParams, Submit
from protocol.slots import Change, SlotTable
from tests.support.engine import Driver, head_of
from tests.support.rank_context import RankContext

Fails = Callable[[int, ForwardBatch], bool]


def _failing(executor: Executor, fails: Fails, error: Exception) -> None:
    """Let a forward raise, half way on every rank, where `fails` says so of its number and its batch."""
    forward, count = executor._model.forward, 0

    def failing(batch: ForwardBatch, state: StateRegistry, comm: Communicator) -> ForwardOutput:
        nonlocal count
        count += 1
        output = forward(batch, state, comm)
        if fails(count, batch):
            raise error
        return output

    executor._model.forward = failing  # type: ignore[method-assign]


def _rows(plans: list[Any]) -> list[list[str]]:
    return [list(plan.owners) for plan in plans if plan.spans]


def _recorded(driver: Driver) -> list[Any]:
    """The plans that the head makes from now on."""
    plans: list[Any] = []
    plan = driver.scheduler.plan

    def recording() -> Any:
        made = plan()
        if made is not None:
            plans.append(made)
        return made

    driver.scheduler.plan = recording  # type: ignore[method-assign]
    return plans


def _run(driver: Driver, requests: list[dict[str, Any]]) -> dict[str, Any]:
    plans = _recorded(driver)
    for number, request in enumerate(requests):
        driver.submit(str(number), **request)
    driver.finish()
    return {"answers": [asdict(driver.answers[str(n)]) for n in range(len(requests))], "rows": _rows(plans)}


def failing_steps(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], steps: list[int], **settings: Any) -> Any:
    """The forwards of these numbers fail alike on every rank: the answers, and who was in each step."""
    with head_of(
        ctx,
        folder,
        arrange=lambda executor: _failing(executor, lambda count, _: count in steps, ValueError("once, alike")),
        **settings,
    ) as driver:
        return None if driver is None else _run(driver, requests)


def no_memory(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], most: int, **settings: Any) -> Any:
    """Every batch of more than `most` sequences runs out of device memory on every rank."""
    error = torch.OutOfMemoryError("out of memory: tried to allocate 20.00 GiB")
    with head_of(
        ctx, folder, arrange=lambda executor: _failing(executor, lambda _, batch: len(batch.slots) > most, error), **settings
    ) as driver:
        return None if driver is None else _run(driver, requests)


def token_breaks(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], token: int, **settings: Any) -> Any:
    """Every batch that is given `token` fails alike."""
    error = ValueError(f"token {token} breaks the forward")
    with head_of(
        ctx,
        folder,
        arrange=lambda executor: _failing(executor, lambda _, batch: bool((batch.token_ids == token).any()), error),
        **settings,
    ) as driver:
        return None if driver is None else _run(driver, requests)


def _submit(driver: Driver, name: str, request: dict[str, Any], suspicions: int) -> None:
    params = SamplingParams(seed=0, temperature=0.0, ignore_eos=True, max_tokens=request["max_tokens"])
    driver.send(Submit(name, name, request["prompt"], params, suspicions=suspicions))


def suspect(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], number: int, suspicions: int, **settings: Any) -> Any:
    """One of the requests is a suspect. For each forward: who is in it, whom the page names, how many steps are under way."""
    seen: list[tuple[list[str], str, int]] = []
    heads: list[Driver] = []

    def arrange(executor: Executor) -> None:
        execute = executor.execute

        def watching(frame: Frame, change: Change, slots: SlotTable, choose: Choose) -> None:
            if heads and isinstance(frame.command, Forward):
                owners = list(heads[0].scheduler._launched[-1].plan.owners)
                seen.append((owners, heads[0].page.read().alone, len(heads[0].head._in_flight)))
            execute(frame, change, slots, choose)

        executor.execute = watching  # type: ignore[method-assign]

    with head_of(ctx, folder, arrange=arrange, **settings) as driver:
        if driver is None:
            return None
        heads.append(driver)
        for index, request in enumerate(requests):
            _submit(driver, str(index), request, suspicions if index == number else 0)
        between = set()
        while any(answer.finish is None for answer in driver.answers.values()):
            driver.turn()
            between.add(driver.page.read().alone)
        driver.finish()
        return {
            "answers": [asdict(driver.answers[str(n)]) for n in range(len(requests))],
            "seen": list(seen),
            "between": sorted(between),
        }


def suspect_kills(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], token: int, **settings: Any) -> Any:
    """A suspect takes a rank's process with it: whom the head's page names then, and who had an answer."""

    def arrange(executor: Executor) -> None:
        forward = executor._model.forward

        def deadly(batch: ForwardBatch, state: StateRegistry, comm: Communicator) -> ForwardOutput:
            if ctx.rank == ctx.world - 1 and bool((batch.token_ids == token).any()):
                os._exit(7)
            return forward(batch, state, comm)

        executor._model.forward = deadly  # type: ignore[method-assign]

    found: list[Driver] = []
    try:
        with head_of(ctx, folder, arrange=arrange, **settings) as driver:
            if driver is None:
                return None
            found.append(driver)
            for index, request in enumerate(requests):
                _submit(driver, str(index), request, 2 if token in request["prompt"] else 0)
            driver.finish()
            return "nothing happened"
    except EpLinkLost as error:
        if not found:
            return type(error).__name__
        return found[0].page.read().alone, {name: answer.finish for name, answer in found[0].answers.items()}


def fails_behind(
    ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], number: int, ranks: list[int], **settings: Any
) -> Any:
    """Only `ranks` fail forward `number`, behind its last collective: what the head finds, and who got how many tokens."""

    def arrange(executor: Executor) -> None:
        execute, count = executor.execute, 0

        def failing(frame: Frame, change: Change, slots: SlotTable, choose: Choose) -> None:
            nonlocal count
            execute(frame, change, slots, choose)
            count += isinstance(frame.command, Forward)
            if ctx.rank in ranks and isinstance(frame.command, Forward) and count == number:
                raise ValueError("not everywhere")

        executor.execute = failing  # type: ignore[method-assign]

    found: list[Driver] = []
    try:
        with head_of(ctx, folder, arrange=arrange, **settings) as driver:
            if driver is None:
                return None
            found.append(driver)
            return _run(driver, requests)
    except EpLinkLost as error:
        if not found:
            return type(error).__name__
        return type(error).__name__, str(error), [len(answer.tokens) for answer in found[0].answers.values()]
