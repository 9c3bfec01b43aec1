"""What ranks run in the tests of overload: lengths at every bound, full queues, and storms of submissions and aborts."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

from protocol.messages import Abort
from tests.support.engine import Driver, head_of
from tests.support.rank_context import RankContext


def bounds(ctx: RankContext, *, folder: str, requests: dict[str, dict[str, Any]], **settings: Any) -> Any:
    """All requests at once: their answers, and the limits that the engine has."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        for name, request in requests.items():
            driver.submit(name, **request)
        driver.finish()
        limits = driver.scheduler.limits
        found = {"num_blocks": limits.num_blocks, "max_model_len": limits.max_model_len}
        return {"answers": {name: asdict(answer) for name, answer in driver.answers.items()}, "limits": found}


def full_queue(ctx: RankContext, *, folder: str, count: int, **settings: Any) -> Any:
    """`count` requests in one breath, then again as many once the first are over: statuses, retry times and sizes."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        retries: list[float | None] = []
        driver.on_update = lambda update: retries.append(update.retry_after) if update.status == 429 else None
        waves = []
        for wave in range(2):
            names = [f"{wave}-{number}" for number in range(count)]
            for name in names:
                driver.submit(name, [5, 6, 7], max_tokens=3)
            driver.turn()
            waiting = driver.scheduler.stats().waiting
            driver.finish()
            waves.append({"status": [driver.answers[name].status for name in names], "waiting": waiting})
        ends = [answer.terminal_events for answer in driver.answers.values()]
        return {"waves": waves, "retries": retries, "ends": ends}


class Storm:
    """Submits and aborts as `rng` says: before a request's first turn, with it, after its end, twice, of no request."""

    def __init__(self, driver: Driver, rng: random.Random, requests: list[dict[str, Any]]) -> None:
        self._driver = driver
        self._rng = rng
        self._requests = requests
        self._count = 0
        self.kinds: dict[str, int] = {}
        self.aborted: set[str] = set()

    def blow(self, submissions: int) -> None:
        """Until this many were submitted, with a few turns after each gust."""
        while self._count < submissions:
            for _ in range(self._rng.randrange(1, 7)):
                self._submit()
            for _ in range(self._rng.randrange(5)):
                self._abort()
            for _ in range(self._rng.choice([0, 1, 1, 2, 12])):
                self._driver.turn()

    def _submit(self) -> None:
        name = f"{self._count % len(self._requests)}:{self._count}"
        self._driver.submit(name, **self._requests[self._count % len(self._requests)])
        self._count += 1
        if self._rng.random() < 0.1:
            self._send("in one breath", [name])

    def _abort(self) -> None:
        answers = self._driver.answers
        live = [name for name, answer in answers.items() if answer.finish is None]
        ended = [name for name, answer in answers.items() if answer.finish is not None]
        fresh = [name for name in live if not answers[name].tokens]
        begun = [name for name in live if answers[name].tokens]
        kind, pool = self._rng.choice(
            [("before its first token", fresh), ("in the middle", begun), ("after its end", ended), ("of nobody", ["nobody", ""])]
        )
        if pool:
            chosen = self._rng.sample(pool, min(len(pool), self._rng.randrange(1, 4)))
            self._send(kind, chosen)
            if self._rng.random() < 0.3:
                self._send("twice", chosen + chosen)

    def _send(self, kind: str, names: list[str]) -> None:
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.aborted.update(names)
        self._driver.send(Abort(names))


def abort_storm(
    ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], submissions: int, seed: int, **settings: Any
) -> Any:
    """Hundreds of submissions and aborts interleaved; the books are checked in every turn and nothing may be left at the end."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        storm = Storm(driver, random.Random(seed), requests)
        storm.blow(submissions)
        driver.finish()
        driver.sampler.check_integrity()
        stats = driver.scheduler.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert not driver.head.requests.ids()
        # A FREE that is due goes out with the next plan: a last request sees that everything is whole.
        driver.submit("0:last", **requests[0])
        driver.finish()
        answers = {name: asdict(answer) for name, answer in driver.answers.items()}
        return {"answers": answers, "kinds": storm.kinds, "aborted": sorted(storm.aborted), "preemptions": stats.preemptions}
