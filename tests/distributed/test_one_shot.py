"""Sums through peer memory by several processes, in Triton's interpreter: the same bits on all ranks, in rank order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.distributed.comm_cases import part
from tests.distributed.one_shot_cases import choices
from tests.support.ranks import RankPool

CASES = "tests.distributed.one_shot_cases:"
SHAPES = [[1, 48], [5, 48], [3, 48], [0, 48], [9, 48], [2, 48], [450, 48], [4, 48]]
"""450 rows are several tiles of each of two programs, the last of them with rows to spare."""


PATIENCE_S = 480.0
"""Seconds here take minutes beside other work: each program spins until its peer's has had a turn of the processor."""


def sum_of_choices(world: int, call: int, shape: tuple[int, int], dtype: torch.dtype) -> np.ndarray:
    """Each rank's own choices in their order, rounded once; then the ranks in theirs."""
    total = np.zeros(shape, np.float32)
    for rank in range(world):
        value, mine = choices(rank, world, call, shape, dtype)
        share = np.zeros(shape, np.float32)
        for choice in range(3):
            share += np.where(mine[:, choice, None], value[:, choice].float(), 0)
        total += torch.from_numpy(share).to(dtype).float().numpy()
    return torch.from_numpy(total).to(dtype).float().numpy()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is chosen where there is no GPU")
@pytest.mark.parametrize(
    ("world", "dtype", "programs", "line", "reader", "word_rows", "two_shots"),
    [
        (2, "float32", 256, 32, "warps", 0, False),
        (2, "float16", 2, 32, "thread", 256, False),
        (2, "float16", 1, 32, "thread", 4, False),
        (3, "float32", 2, 32, "thread", 256, False),
        (2, "float16", 4, 2, "thread", 0, False),
        (3, "float32", 2, 3, "atomic", 0, False),
        (1, "float16", 4, 32, "warps", 4, False),
        (2, "float16", 4, 32, "thread", 0, True),
        (3, "float32", 2, 32, "thread", 4, True),
    ],
)
def test_every_rank_gets_the_sum_in_rank_order(
    ranks: RankPool, world: int, dtype: str, programs: int, line: int, reader: str, word_rows: int, two_shots: bool
) -> None:
    ways = {"programs": programs, "line": line, "reader": reader, "word_rows": word_rows, "two_shots": two_shots}
    found = ranks.run(world, CASES + "sum_rows", dtype=dtype, shapes=SHAPES, **ways, deadline=PATIENCE_S)
    of = getattr(torch, dtype)
    for call, shape in enumerate(SHAPES):
        parts = [part(rank, call, tuple(shape), of) for rank in range(world)]
        total = np.zeros(shape, np.float32)
        for one in parts:
            total += one.float().numpy()
        rounded = torch.from_numpy(total).to(of)
        x = (rounded.float() + part(0, call + 100, tuple(shape), torch.float32).to(of).float()).to(of).double().numpy()
        normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * np.linspace(0.5, 1.5, shape[1])
        for rank in range(world):
            got = found[rank][call]
            assert np.array_equal(got["total"], rounded.float().numpy())
            assert np.array_equal(got["x"], x)
            np.testing.assert_allclose(got["normed"], normed, rtol=1e-5 if dtype == "float32" else 2e-3, atol=1e-3)
            assert np.array_equal(got["chosen"], sum_of_choices(world, call, (shape[0], shape[1]), of))
        shards = np.concatenate([one.float().numpy() for one in parts], 1)
        assert np.array_equal(found[0][call]["gathered"], shards)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is chosen where there is no GPU")
@pytest.mark.parametrize(
    ("reader", "word_rows", "two_shots"),
    [
        ("warps", 0, False),
        ("thread", 0, False),
        ("atomic", 0, False),
        ("warps", 8, False),
        ("thread", 8, False),
        ("warps", 0, True),
        ("thread", 0, True),
    ],
)
def test_the_host_ends_a_wait_for_a_peer_that_does_not_come(ranks: RankPool, reader: str, word_rows: int, two_shots: bool) -> None:
    ways = {"reader": reader, "word_rows": word_rows, "two_shots": two_shots}
    assert ranks.run(2, CASES + "wait_alone", **ways, deadline=60.0) == [True, True]
