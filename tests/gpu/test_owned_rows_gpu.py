"""Rows that stay with their owners, through peer memory on two and four GPUs: the bits of sums, where they belong."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_sums_gpu import COUNTS
from tests.support.ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
four_devices = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")


@pytest.mark.parametrize(
    ("world", "dtype", "pdl", "width", "two_shots"),
    [
        (2, "bfloat16", True, 2048, False),
        (2, "float16", False, 2048, False),
        (2, "float32", False, 40, False),
        (2, "bfloat16", False, 2048, True),
        pytest.param(4, "bfloat16", True, 2048, True, marks=four_devices),
    ],
)
def test_rows_are_where_they_belong(ranks: RankPool, world: int, dtype: str, pdl: bool, width: int, two_shots: bool) -> None:
    ways = {"dtype": dtype, "counts": COUNTS, "width": width, "pdl": pdl, "two_shots": two_shots}
    assert ranks.run(world, "tests.gpu.owned_rows_cases:move_on_gpus", **ways, deadline=300.0) == [[]] * world
