"""Health and readiness of a server, sampled ten times a second while things happen to it."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx

SAMPLE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Look:
    """One sample. `at` is the monotonic time before /ready was asked; `epoch` is what /metrics said right after its answer."""

    at: float
    health: int
    ready: int
    reason: str
    epoch: int


class Watch:
    """A thread that looks; use it as a context."""

    def __init__(self, url: str) -> None:
        self.looks: list[Look] = []
        self._http = httpx.Client(base_url=url, timeout=10, trust_env=False)
        self._over = threading.Event()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(30)
        self._http.close()
        if self._fault is not None and error is None:
            raise self._fault

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._over.is_set():
                self.looks.append(self._look())
                due = max(due + SAMPLE_SECONDS, time.monotonic())
                self._over.wait(due - time.monotonic())
        except BaseException as fault:
            self._fault = fault

    def _look(self) -> Look:
        health = self._http.get("/health").status_code
        at = time.monotonic()
        ready = self._http.get("/ready")
        lines = self._http.get("/metrics").text.splitlines()
        epoch = next(float(line.split()[1]) for line in lines if line.startswith("ep_epoch "))
        return Look(at, health, ready.status_code, ready.text, int(epoch))

    def untruthful(self, epoch: int, since: float) -> list[Look]:
        """Looks from `since` on that found the server ready in an epoch that was over by then."""
        return [look for look in self.looks if look.at >= since and look.epoch == epoch and look.ready == 200]

    def stalled(self, begin: float, end: float) -> float:
        """Seconds beyond its interval in which this thread did not come to look: the host had no time for what was due."""
        return max(0.0, self.gap(begin, end) - SAMPLE_SECONDS)

    def unready(self, begin: float, end: float) -> list[Look]:
        """Looks in this time that did not find the server ready."""
        return [look for look in self.looks if begin <= look.at <= end and look.ready != 200]

    def gap(self, begin: float, end: float) -> float:
        """The longest time without a look, in seconds: what was not seen proves nothing."""
        times = [begin, *(look.at for look in self.looks if begin <= look.at <= end), end]
        return max(after - before for before, after in itertools.pairwise(times))
