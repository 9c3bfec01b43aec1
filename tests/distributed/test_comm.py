"""Collectives over sockets and over shared memory: right values in rank order, the same bits on every rank, and leaving one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.distributed.comm_cases import LARGE, part
from tests.support.ranks import RankPool

CASES = "tests.distributed.comm_cases:"
SHAPES = [[1, 7], [0, 7], [64, 40], [3], [LARGE], [1, 7], [2, 3, 4]]
SHARED = pytest.mark.parametrize("shared", [False, True], ids=["sockets", "shared"])


@SHARED
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_are_in_rank_order_with_the_same_bits_everywhere(ranks: RankPool, world: int, shared: bool, dtype: str) -> None:
    found = ranks.run(world, CASES + "sums", shared=shared, shapes=SHAPES, dtype=dtype)
    for call, shape in enumerate(SHAPES):
        expected = np.zeros(shape, dtype=np.float32)
        for rank in range(world):
            expected = expected + part(rank, call, tuple(shape), getattr(torch, dtype)).float().numpy()
        rounded = torch.from_numpy(expected).to(getattr(torch, dtype)).float().numpy()
        for sums in found:
            np.testing.assert_array_equal(sums[call], rounded)


@SHARED
@pytest.mark.parametrize("world", [2, 4])
def test_gathers_and_broadcasts_in_turn(ranks: RankPool, world: int, shared: bool) -> None:
    rounds = 40
    found = ranks.run(world, CASES + "shows", shared=shared, rounds=rounds)
    for call in range(rounds):
        for rank, piece in enumerate(found[0]["gathered"][call]):
            np.testing.assert_array_equal(piece, part(rank, call, (3, 1 + call % 5), torch.float32).numpy())
        for seen in found:
            np.testing.assert_array_equal(seen["told"][call], np.arange(call % 7) + 100 * call)


@pytest.mark.parametrize("peer", ["killed", "leaves"])
@pytest.mark.parametrize(("shared", "elements"), [(False, 8), (True, 8), (True, LARGE)], ids=["sockets", "shared", "too-large"])
def test_a_collective_that_a_peer_does_not_come_to_is_left_and_leaves_no_thread(
    ranks: RankPool, shared: bool, elements: int, peer: str
) -> None:
    survivor, other = ranks.outcomes(2, CASES + "leave_pending", shared=shared, elements=elements, peer=peer, deadline=60.0)
    assert other.kind == ("died" if peer == "killed" else "returned")
    found = survivor.value
    assert found["seconds"] < 10.0, "it waited for the operation, which takes a minute to end by itself"
    assert found["slices"][0] < 0.1, "the epoch is not looked at every 20 ms"
    by_socket = not shared or elements == LARGE
    # Gloo may have seen the death first: then the operation has ended, and nothing is left to park.
    allowed = {int(by_socket)} if peer == "leaves" else {0, int(by_socket)}
    assert found["parked"] in allowed
    assert found["after"] == 0
