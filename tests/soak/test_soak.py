"""A minute of `make soak`, and that its judgement sees what grows."""

from __future__ import annotations

import random

import pytest

from tests.soak.flat import MIB, Judgement, judge, judge_generations
from tests.soak.sample import Series
from tests.soak.soak import Settings, run_soak

SECONDS = 90.0
REQUESTS = 500
KILL_SECONDS = 45.0


def test_a_minute_of_soak() -> None:
    """After the warm-up third, a minute is judged; in the middle an engine is killed."""
    outcome = run_soak(Settings(SECONDS, REQUESTS, KILL_SECONDS))
    print(outcome.text())
    assert outcome.faults == []
    assert outcome.kills == 1
    assert {one.role for one in outcome.judged} >= {"engine 0", "engine 1", "frontend", "supervisor 0", "supervisor 1"}


def series(memory: list[float], files: list[int] | None = None) -> Series:
    """A process that was sampled once a second."""
    count = len(memory)
    return Series(
        "engine 0", 1, [float(at) for at in range(count)], [int(size * MIB) for size in memory], files or [20] * count, [8] * count
    )


def judged(memory: list[float], files: list[int] | None = None) -> Judgement:
    found = judge(series(memory, files))
    assert found is not None
    return found


def test_noise_and_a_warm_up_are_flat() -> None:
    rng = random.Random(1)
    assert judged([min(400.0, 100.0 + 3 * at) + rng.uniform(-4, 4) for at in range(600)]).faults == ()


@pytest.mark.parametrize(
    ("memory", "files", "words"),
    [
        ([300 + 0.05 * at for at in range(600)], None, "memory rises by 20.0 MiB in 399 s"),
        ([300 + 40 * (at == 500) for at in range(600)], None, "memory has a peak 40.0 MiB"),
        ([300] * 600, [20 + at // 100 for at in range(600)], "descriptors: 22 at first, 25 at last"),
        ([300] * 600, [20 + 30 * (at == 500) for at in range(600)], "descriptors: 20 at first, 20 at last, at most 50"),
    ],
    ids=["leak", "peak", "descriptors", "many descriptors"],
)
def test_what_grows_is_a_fault(memory: list[float], files: list[int] | None, words: str) -> None:
    (fault,) = judged(memory, files).faults
    assert words in fault


def test_a_short_life_is_not_judged_and_heirs_are_compared() -> None:
    assert judge(series([300] * 20)) is None
    first, heir = judged([300] * 100), judged([350] * 100)
    assert judge_generations([first, first]) == []
    assert "engine 0: 350 MiB in process 1, 300 MiB in the first one" in judge_generations([first, heir])
