"""Sums through peer memory on two GPUs: exact, in words and in tiles, plain, with residual and norm, of partials and of choices."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

COUNTS = [1, 5, 128, 256, 257, 3000, 2]
"""The last number of rows that goes in words, the first that does not, and several tiles a program."""


@pytest.mark.parametrize(("dtype", "pdl"), [("bfloat16", True), ("float16", False), ("float32", False)])
def test_sums_are_exact_and_the_same_on_both_ranks(ranks: RankPool, dtype: str, pdl: bool) -> None:
    first, second = ranks.run(2, "tests.gpu.sums_cases:sum_on_gpus", dtype=dtype, counts=COUNTS, pdl=pdl, deadline=300.0)
    assert first["wrong"] == second["wrong"] == []
    assert first["digest"] == second["digest"]
