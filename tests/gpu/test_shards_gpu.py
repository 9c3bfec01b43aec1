"""Logits that stay on two GPUs: the head finds the best of each row, reads some whole, and sends every rank its tokens."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

STEPS = [[1, 151936], [8, 248320], [128, 151936], [7, 5001], [256, 151936], [1, 3], [33, 50257]]


@pytest.mark.parametrize(("dtype", "pdl"), [("bfloat16", True), ("float16", False)])
def test_the_best_whole_rows_and_tokens(ranks: RankPool, dtype: str, pdl: bool) -> None:
    case = "tests.gpu.shards_cases:steps_on_gpus"
    assert ranks.run(2, case, dtype=dtype, steps=STEPS, pdl=pdl, deadline=300.0) == [[], []]
