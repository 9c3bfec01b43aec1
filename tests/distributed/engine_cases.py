"""What ranks run in the engine's tests; every function runs on every rank of a job, and rank 0 drives."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from protocol.messages import Abort
from tests.support.engine import head_of
from tests.support.rank_context import RankContext


def generate(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], together: bool, **settings: Any) -> Any:
    """Run the requests (all at once, or one after the other): their answers, and the head's totals."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        for number, request in enumerate(requests):
            driver.submit(str(number), **request)
            if not together:
                driver.finish()
        driver.finish()
        stats = driver.scheduler.stats()
        answers = [asdict(driver.answers[str(number)]) for number in range(len(requests))]
    return {"answers": answers, "preemptions": stats.preemptions, "steps": driver.broadcaster.step}


def abort_some(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], aborts: dict[str, int], **settings: Any) -> Any:
    """Run the requests together; abort request `r` once it has `aborts[r]` tokens (0: before its first turn)."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        for number, request in enumerate(requests):
            driver.submit(str(number), **request)
        pending = dict(aborts)
        while any(answer.finish is None for answer in driver.answers.values()):
            for request_id in [r for r, count in pending.items() if len(driver.answers[r].tokens) >= count]:
                driver.send(Abort([request_id]))
                del pending[request_id]
            driver.turn()
        driver.finish()
        return [asdict(driver.answers[str(number)]) for number in range(len(requests))]
