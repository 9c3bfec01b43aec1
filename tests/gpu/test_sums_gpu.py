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


@pytest.mark.parametrize(
    ("dtype", "pdl", "width", "two_shots"),
    [
        ("bfloat16", True, 2048, False),
        ("float16", False, 2048, False),
        ("float32", False, 2048, False),
        ("bfloat16", True, 40, False),
        ("bfloat16", False, 2048, True),
        ("float32", False, 40, True),
    ],
)
def test_sums_are_exact_and_the_same_on_both_ranks(ranks: RankPool, dtype: str, pdl: bool, width: int, two_shots: bool) -> None:
    ways = {"dtype": dtype, "counts": COUNTS, "width": width, "pdl": pdl, "two_shots": two_shots}
    first, second = ranks.run(2, "tests.gpu.sums_cases:sum_on_gpus", **ways, deadline=300.0)
    assert first["wrong"] == second["wrong"] == []
    assert first["digest"] == second["digest"]
