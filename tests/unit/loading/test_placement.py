"""Shards of the vocabulary and homes of the experts, by hand-counted numbers and by what every placement must satisfy."""

from __future__ import annotations

import numpy as np
import pytest

from model.parallel import ExpertPlacement, Parallel


@pytest.mark.parametrize(
    ("experts", "world", "counts"),
    [
        (10, 4, [3, 3, 2, 2]),
        (3, 5, [1, 1, 1, 0, 0]),
        (8, 2, [4, 4]),
        (7, 1, [7]),
        (0, 3, [0, 0, 0]),
        (128, 8, [16] * 8),
        (5, 3, [2, 2, 1]),
    ],
)
def test_experts_are_contiguous_and_balanced(experts: int, world: int, counts: list[int]) -> None:
    placement = ExpertPlacement.build(experts, world)
    held = [placement.local(rank) for rank in range(world)]
    assert [len(part) for part in held] == counts
    assert [expert for part in held for expert in part] == list(range(experts))
    for rank, part in enumerate(held):
        for local, expert in enumerate(part):
            assert placement.owner(expert) == (rank, local)
    table = placement.table()
    assert table.dtype == np.int32
    assert table.shape == (experts, 2)
    assert [tuple(row) for row in table.tolist()] == [placement.owner(expert) for expert in range(experts)]


def test_table_has_room_for_replicas() -> None:
    placement = ExpertPlacement(2, (((0, 0), (1, 1)), ((1, 0),)))
    assert placement.table().tolist() == [[0, 0, 1, 1], [1, 0, -1, -1]]
    assert placement.local(1) == (1, 0)
    assert placement.owner(0) == (0, 0)


def test_placement_is_a_value() -> None:
    assert ExpertPlacement.build(10, 4) == ExpertPlacement.build(10, 4)
    assert hash(ExpertPlacement.build(10, 4)) == hash(ExpertPlacement.build(10, 4))
    assert ExpertPlacement.build(10, 4) != ExpertPlacement.build(10, 5)


@pytest.mark.parametrize(
    ("vocab", "world", "sizes"),
    [(10, 4, [3, 3, 3, 1]), (5, 4, [2, 2, 1, 0]), (2, 5, [1, 1, 0, 0, 0]), (49152, 2, [24576, 24576]), (7, 1, [7])],
)
def test_vocabulary_rows(vocab: int, world: int, sizes: list[int]) -> None:
    shards = [Parallel(rank, world).vocab_rows(vocab) for rank in range(world)]
    assert [len(rows) for rows in shards] == sizes
    assert [row for rows in shards for row in rows] == list(range(vocab))
    assert Parallel(0, world).vocab_shard(vocab) == max(sizes)
    assert [Parallel(0, world).vocab_rows(vocab, rank) for rank in range(world)] == shards


@pytest.mark.parametrize(("rank", "world"), [(1, 1), (-1, 2), (0, 0)])
def test_a_rank_outside_its_world_is_refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="not in a world"):
        Parallel(rank, world)
