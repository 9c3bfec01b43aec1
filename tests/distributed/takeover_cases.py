"""What rank 0 does when one frontend takes another's place; every function runs on every rank of a job."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from protocol.messages import SamplingParams, Submit, Takeover
from tests.distributed.chaos_cases import grammar_mask
from tests.support.engine import head_of
from tests.support.rank_context import RankContext


def takeover(ctx: RankContext, *, folder: str, **settings: Any) -> Any:
    """An old frontend's sequences that run, wait in the queue or for a mask, or come too late, beside a new one's: all answers."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        driver.send(Takeover("old-"))
        grammar = SamplingParams(seed=0, max_tokens=9, temperature=0.0, ignore_eos=True, grammar=True)
        driver.send(Submit("old-mask", "g", [5, 6], grammar, mask=grammar_mask([5, 6], [])))
        for number in range(4):
            driver.submit(f"old-{number}", [5, 6, 7], max_tokens=200)
        for _ in range(3):
            driver.turn()
        driver.send(Takeover("new-"))
        driver.submit("old-late", [5, 6, 7], max_tokens=4)
        driver.submit("new-1", [5, 6, 7], max_tokens=8)
        driver.turn()
        ended = sorted(name for name, answer in driver.answers.items() if answer.finish is not None)
        driver.finish()
        return {"ended": ended, "answers": {name: asdict(answer) for name, answer in driver.answers.items()}}
