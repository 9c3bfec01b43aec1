"""A profile of decode steps decodes until all sequences have met for as long as it looks, and not much longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ep_runtime.bench.decode import _profile_tokens
from ep_runtime.bench.profile import SKIP, STEPS

INTAKE = 64
"""Requests that a turn of the head takes in."""


def first_sequence_tokens(batch: int, prompt_len: int, budget: int) -> int:
    """Of steps that decode first, then take prompts in order: the first sequence's tokens when all have decoded for a profile."""
    left = [prompt_len] * batch
    tokens = full = taken = 0
    while full < SKIP + STEPS:
        taken = min(batch, taken + INTAKE)
        decoding = [number for number in range(taken) if left[number] == 0]
        full += len(decoding) == batch
        room = budget - len(decoding)
        for number in range(taken):
            piece = min(left[number], max(0, room))
            left[number], room = left[number] - piece, room - piece
        tokens += left[0] == 0
    return tokens


@pytest.mark.parametrize(
    ("batch", "prompt_len", "budget"),
    [(1, 128, 11776), (8, 4096, 8192), (128, 128, 11776), (256, 128, 11776), (256, 1024, 11776), (256, 1024, 2048)],
)
def test_all_sequences_meet_and_few_steps_are_wasted(batch: int, prompt_len: int, budget: int) -> None:
    llm = SimpleNamespace(config=SimpleNamespace(max_num_batched_tokens=budget))
    needed = first_sequence_tokens(batch, prompt_len, budget)
    assert needed < _profile_tokens(cast("Any", llm), batch, prompt_len) <= 1.2 * needed + 8
