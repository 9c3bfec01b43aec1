"""Runs numbered random cases until a time is over. Case i of a seed is always the same, so that one that fails can be run alone."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import psutil

Case = Callable[[random.Random], None]
HANG_SECONDS = 60.0
GROWTH_BYTES = 96 << 20
"""What this process may grow by after its first second: lists of messages, caches of the interpreter, and a case of 16 MiB."""


class Hang(Exception):
    """A case did not end in time."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, and which cases: from `first` on, all that fit in `seconds`, or exactly `count`."""

    seed: int
    seconds: float
    first: int = 0
    count: int | None = None

    def share(self, part: float) -> Plan:
        """The same for a part of the time."""
        return Plan(self.seed, self.seconds * part, self.first, self.count)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"a case took longer than {seconds:g} s")

    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def run_cases(name: str, case: Case, plan: Plan, hang_seconds: float = HANG_SECONDS) -> int:
    """Run cases and return how many; what a case raises leaves with a note that says how to run it again."""
    process = psutil.Process()
    began = time.monotonic()
    settled, warm = 0, False
    number = plan.first
    while number - plan.first < plan.count if plan.count is not None else time.monotonic() - began < plan.seconds:
        if not warm and time.monotonic() - began > 1.0:
            settled, warm = process.memory_info().rss, True
        try:
            with _alarm(hang_seconds):
                case(random.Random(f"{plan.seed}/{name}/{number}"))
        except BaseException as error:
            error.add_note(f"repeat with: make fuzz SEED={plan.seed} CASE={name}:{number}")
            raise
        number += 1
    grown = process.memory_info().rss - settled if warm else 0
    assert grown < GROWTH_BYTES, f"{name}: memory grew by {grown >> 20} MiB in {number - plan.first} cases; seed {plan.seed}"
    print(f"{name}: {number - plan.first} cases in {time.monotonic() - began:.0f} s, seed {plan.seed}, nothing found", flush=True)
    return number - plan.first
