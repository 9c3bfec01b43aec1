"""What ranks agree on before the first request: the decode steps that all have captured, and memory that all can map."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_runtime.engine import host_memory
from ep_runtime.engine.graphs import captured_everywhere
from model.base import SingleRank


class SecondRank(SingleRank):
    """A world of two whose other rank has captured `theirs`."""

    world = 2

    def __init__(self, theirs: list[bool]) -> None:
        self._theirs = theirs

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        self.launched += 1
        return partial + torch.tensor(self._theirs, dtype=partial.dtype)


def test_a_step_is_replayed_where_every_rank_has_captured_it() -> None:
    comm = SecondRank([True, False, True, False])
    assert captured_everywhere([True, True, False, False], comm, torch.device("cpu")) == [True, False, False, False]
    assert comm.launched == 1
    assert captured_everywhere([True, False], SingleRank(), torch.device("cpu")) == [True, False]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Has /dev/shm refuse to give bytes; the files that were asked for."""
    asked: list[str] = []
    real = os.posix_fallocate

    def fallocate(descriptor: int, offset: int, size: int) -> None:
        asked.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if asked[-1].startswith("/dev/shm"):
            raise OSError(28, "No space left on device")
        real(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    monkeypatch.setattr(host_memory.tempfile, "tempdir", str(tmp_path))
    return asked


class Store(dict[str, Any]):
    """The two calls of a rendezvous store that a world of one needs."""

    def set(self, key: str, value: Any) -> None:
        self[key] = value


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_shared_memory_without_room_lies_in_the_temporary_folder(full: list[str], tmp_path: Path) -> None:
    memory = host_memory.HostMemory(Store(), epoch=1, rank=0, world=1, check=lambda: None)
    part = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert [tensor.tolist() for tensor in memory.exchange(part)] == [part.tolist()]
    assert [Path(path).parent for path in full] == [Path("/dev/shm"), tmp_path]
    assert not any(os.path.exists(path) for path in full), "no file may be left behind"
