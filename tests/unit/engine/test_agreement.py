"""What ranks agree on before the first request: the decode steps that all have captured, and memory that all can map."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ep_runtime.engine.graphs import captured_everywhere
from ep_runtime.engine.host_memory import NONCE_BYTES, HostMemory, share_memory
from model.base import SingleRank
from protocol.errors import EpDeadline, EpEpochClosed

LONG_S = 20.0


class WithOthers(SingleRank):
    """A world of this rank and others, each of which has captured what its entry of `others` says."""

    def __init__(self, *others: list[bool]) -> None:
        self.world = 1 + len(others)
        self._others = torch.tensor(others)

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        self.launched += 1
        return partial + self._others.sum(0).to(partial.dtype)


def test_a_step_is_replayed_where_every_rank_has_captured_it() -> None:
    comm = WithOthers([True, False, True, False])
    assert captured_everywhere([True, True, False, False], comm, torch.device("cpu")) == [True, False, False, False]
    assert comm.launched == 1
    three = WithOthers([True, True, False, True, False], [True, False, True, True, False])
    assert captured_everywhere([True, True, True, False, True], three, torch.device("cpu")) == [True] + [False] * 4
    assert captured_everywhere([True, False], SingleRank(), torch.device("cpu")) == [True, False]


class Meeting:
    """Ranks as threads of this process, and their exchange; `spoil` changes what one rank is told."""

    def __init__(
        self,
        world: int,
        spoil: Callable[[int, list[bytes]], list[bytes]] = lambda rank, shares: shares,
        *,
        check: Callable[[], None] = lambda: None,
        timeout_s: float = LONG_S,
    ) -> None:
        self.world = world
        self._check, self._timeout_s = check, timeout_s
        self._spoil = spoil
        self._barrier = threading.Barrier(world, timeout=10)
        self._shares = [b""] * world

    def share(self, rank: int) -> HostMemory | None:
        def exchange(own: bytes) -> list[bytes]:
            self._shares[rank] = own
            self._barrier.wait()
            shares = self._spoil(rank, list(self._shares))
            self._barrier.wait()
            return shares

        return share_memory(exchange, rank=rank, world=self.world, check=self._check, timeout_s=self._timeout_s)

    def run(self, each: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.world) as ranks:
            return list(ranks.map(each, range(self.world)))


def test_ranks_that_can_map_the_memory_sum_through_it_until_they_drop_it() -> None:
    before = len(os.listdir("/proc/self/fd"))
    meeting = Meeting(3)
    memories = meeting.run(meeting.share)
    parts = [torch.arange(6, dtype=torch.float32).reshape(2, 3) * rank for rank in range(3)]
    for _ in range(3):
        found = meeting.run(lambda rank: [part.clone() for part in memories[rank].exchange(parts[rank])])
        assert all(torch.equal(torch.stack(seen), torch.stack(parts)) for seen in found)
    memories.clear()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_wait_for_a_rank_that_does_not_come_ends_in_time_and_with_the_epoch() -> None:
    """Where no coordinator judges it. A rank may come as late as that; a sum that has ended so is the last."""
    meeting = Meeting(2, timeout_s=0.1)
    first, second = meeting.run(meeting.share)
    with pytest.raises(EpDeadline, match=r"rank 1 did not come to a collective within 0\.1 s"):
        first.exchange(torch.ones(3))
    assert [part.tolist() for part in second.exchange(torch.zeros(3))] == [[1.0] * 3, [0.0] * 3]

    def over() -> None:
        raise EpEpochClosed("over")

    meeting = Meeting(2, check=over)
    memories = meeting.run(meeting.share)
    with pytest.raises(EpEpochClosed):
        memories[1].exchange(torch.ones(3))


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_sum_waits_for_each_of_three_ranks(absent: int) -> None:
    meeting = Meeting(3, timeout_s=0.1)
    memories = meeting.run(meeting.share)

    def come(rank: int) -> str:
        if rank == absent:
            return "absent"
        try:
            memories[rank].exchange(torch.ones(3))
        except EpDeadline as error:
            return str(error)
        return "did not wait"

    waited = f"rank {absent} did not come to a collective within 0.1 s"
    assert meeting.run(come) == ["absent" if rank == absent else waited for rank in range(3)]


def another_file(rank: int, shares: list[bytes]) -> list[bytes]:
    """Rank 2 finds, by the name that the head gave, something of the right size that is not the head's memory."""
    if rank == 2 and len(shares[0]) > NONCE_BYTES:
        return [bytes(NONCE_BYTES) + shares[0][NONCE_BYTES:], *shares[1:]]
    return shares


def no_file(rank: int, shares: list[bytes]) -> list[bytes]:
    """Rank 1 finds nothing by that name, as in a process namespace of its own."""
    if rank == 1 and len(shares[0]) > NONCE_BYTES:
        return [shares[0][:NONCE_BYTES] + b"/proc/1/fd/no", *shares[1:]]
    return shares


@pytest.mark.parametrize("spoil", [another_file, no_file])
def test_memory_that_one_rank_cannot_map_is_used_by_none(spoil: Callable[[int, list[bytes]], list[bytes]]) -> None:
    meeting = Meeting(3, spoil)
    assert meeting.run(meeting.share) == [None, None, None]


def test_a_head_without_room_offers_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    meeting = Meeting(2)
    assert meeting.run(meeting.share) == [None, None]
