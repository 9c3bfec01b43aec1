"""What ranks run in the tests of replay: an epoch that is left at some moment, and the next one that takes its requests up."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NoReturn

from ep_runtime.scheduler.core import Plan
from protocol.messages import SamplingParams, Submit
from tests.distributed.chaos_cases import grammar_mask, serve_masks
from tests.support.engine import Driver, head_of
from tests.support.rank_context import RankContext


def _submit(driver: Driver, name: str, request: dict[str, Any], generated: list[int], suspicions: int) -> None:
    params = SamplingParams(**{"temperature": 0.0, **{k: v for k, v in request.items() if k != "prompt"}})
    mask = grammar_mask(request["prompt"], generated) if request.get("grammar") else b""
    message = Submit(name, name, list(request["prompt"]), params, generated=generated, mask=mask, suspicions=suspicions)
    driver.send(message)
    driver.answers[name].tokens = list(generated)


def _never_fails(plan: Plan, error: str) -> NoReturn:
    """In the place of `Scheduler.fail`, which has a failed step computed again, and so right after all."""
    raise AssertionError(f"a step failed on every rank: {error}")


def epoch(
    ctx: RankContext,
    *,
    folder: str,
    requests: dict[str, dict[str, Any]],
    generated: dict[str, list[int]],
    suspicions: int,
    turns: int,
    **settings: Any,
) -> Any:
    """Submit all requests with what they had, and run for `turns` turns (0: to the end): the answers, each from its first token."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        driver.scheduler.fail = _never_fails  # type: ignore[method-assign, assignment]
        serve_masks(driver, requests)
        for name, request in requests.items():
            _submit(driver, name, request, generated.get(name, []), suspicions)
        if turns:
            for _ in range(turns):
                driver.turn()
        else:
            driver.finish()
        return {name: asdict(answer) for name, answer in driver.answers.items()}
