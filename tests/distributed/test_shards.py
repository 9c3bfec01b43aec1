"""Logits that stay on their ranks, by several processes in Triton's interpreter: the best of each row, whole rows, and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.distributed.shards_cases import SLOTS, whole_logits
from tests.support.ranks import RankPool

CASES = "tests.distributed.shards_cases:"
STEPS = [[1, 50], [6, 50], [3, 41], [6, 50], [33, 5000], [2, 2]]
"""Vocabularies that do not divide evenly; the last leaves the third rank without a token."""

interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is chosen where there is no GPU")


def expected_best(logits: torch.Tensor) -> np.ndarray:
    """By a loop over float64: the first of the largest, 0 where a row is unusable, and why it is."""
    found = []
    for row in logits.double().numpy():
        if np.isnan(row).any() or (row == np.inf).any():
            found.append((0, 2))
        elif (row == -np.inf).all():
            found.append((0, 1))
        else:
            found.append((int(np.flatnonzero(row == row.max())[0]), 0))
    return np.array(found)


@interpreter
@pytest.mark.parametrize(("world", "dtype"), [(2, "float16"), (2, "float32"), (3, "float16")])
def test_the_head_gets_the_best_and_every_rank_its_tokens(ranks: RankPool, world: int, dtype: str) -> None:
    found = ranks.run(world, CASES + "step_of_tokens", dtype=dtype, steps=STEPS, deadline=120.0)
    last = np.full(SLOTS, -1)
    for call, (rows, vocab) in enumerate(STEPS):
        logits = whole_logits(call, rows, vocab, getattr(torch, dtype))
        best = expected_best(logits)
        last[np.arange(rows) * 7 % SLOTS] = best[:, 0]
        head = found[0][call]
        assert np.array_equal(head["best"], best)
        assert np.array_equal(head["picked"], logits.float().numpy()[::-1][: (rows + 1) // 2], equal_nan=True)
        for rank in range(world):
            assert np.array_equal(found[rank][call]["last"], last)


@interpreter
@pytest.mark.parametrize("waits", ["best", "told", "tokens", "read"])
def test_the_host_ends_a_wait_for_a_rank_that_does_not_come(ranks: RankPool, waits: str) -> None:
    assert ranks.run(2, CASES + "wait_alone", waits=waits, deadline=60.0) == [True, True]
