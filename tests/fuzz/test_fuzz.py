"""Half a minute of each target of `make fuzz`, always with the same seed."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from tests.fuzz.loop import Hang, Plan, run_cases
from tests.fuzz.targets import TARGETS

SECONDS = 30.0
SEED = 1


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every refusal is logged, and pytest keeps what is logged: the memory that a run takes would be pytest's."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS["wire"])
def test_wire(name: str) -> None:
    share, run = TARGETS["wire"][name]
    run(Plan(SEED, SECONDS).share(share))


def test_http() -> None:
    share, run = TARGETS["http"]["http"]
    run(Plan(SEED, SECONDS).share(share))


def test_a_case_that_fails_says_how_to_repeat_it_and_is_the_same_again() -> None:
    def fails(rng: random.Random) -> None:
        seen.append(rng.random())
        assert seen[-1] < 0.9, seen[-1]

    seen: list[float] = []
    with pytest.raises(AssertionError) as first:
        run_cases("name", fails, Plan(7, 10.0))
    number = len(seen) - 1
    assert first.value.__notes__ == [f"repeat with: make fuzz SEED=7 CASE=name:{number}"]
    with pytest.raises(AssertionError, match=str(seen[-1])):
        run_cases("name", fails, Plan(7, 10.0, first=number, count=1))


def test_a_case_that_does_not_end_is_found() -> None:
    def hangs(rng: random.Random) -> None:
        while True:
            pass

    with pytest.raises(Hang):
        run_cases("name", hangs, Plan(7, 10.0), hang_seconds=0.2)
