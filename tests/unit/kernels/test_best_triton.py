"""The best of each row of one shard, in the interpreter: over parts of a row, with equals, with logits that are none."""

from __future__ import annotations

import pytest
import torch

from kernels.best_triton import best_rows
from tests.distributed.shards_cases import whole_logits
from tests.distributed.test_shards import expected_best


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (5, 63), (6, 2048), (5, 2049), (2, 9000), (0, 65)])
def test_the_first_of_the_largest(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = whole_logits(3, rows, vocab, dtype)
    shard = torch.cat([logits, torch.full((rows, 5), 1e4, dtype=dtype)], 1)
    assert best_rows(shard, vocab, 0).tolist() == expected_best(logits).tolist()


def test_equals_in_different_parts_and_zeros_of_either_sign() -> None:
    logits = torch.full((3, 6000), -1.0)
    logits[0, [2047, 2048, 5999]] = 3.0
    logits[1, 1], logits[1, 4500] = -0.0, 0.0
    logits[2] = -2.0
    assert best_rows(logits, 6000, 0).tolist() == [[2047, 0], [1, 0], [0, 0]]


def test_rows_over_ranks_are_bounded() -> None:
    from kernels.best_triton import BEST_ROWS

    with pytest.raises(ValueError, match="rows must be contiguous"):
        best_rows(torch.zeros(4, 6).t(), 4, 0)
    assert best_rows(torch.zeros(BEST_ROWS + 1, 2), 2, 0).shape == (BEST_ROWS + 1, 2)
