"""Collectives of ranks on one host, on the CPU, through memory that they share: for a decode row far cheaper than sockets.

Every rank owns a region of two halves and a counter. In call n it copies its tensor into half n % 2, sets its counter to n, and
waits until all counters have reached n; then it reads the others' regions. A rank writes half n % 2 again in call n + 2, when every
counter has reached n + 1, and a rank sets n + 1 only after it has read everything of call n.

Counters follow the data in memory only where stores stay in order, so this is for x86-64; other processors use the group's sockets.
"""

from __future__ import annotations

import logging
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)

HALF_BYTES = 8 << 20
"""Of one rank's half; larger tensors go through sockets."""

COUNTER_BYTES = 64
"""A cache line each, so that waiting for one rank does not slow another's counter down."""

SPINS = 200
"""Looks at a counter before the core is offered to others: about what a short collective takes, where every rank has a core."""

YIELDS = 200
"""Offers before the wait sleeps instead, and looks whether the epoch is over."""

NAP_S = 100e-6
CHECK_S = 0.02


def available() -> bool:
    """Whether this processor keeps stores in order."""
    return platform.machine() in ("x86_64", "AMD64")


class HostMemory:
    """One rank's view of the shared regions. `check` raises when the epoch is over; a wait calls it every 20 ms."""

    def __init__(self, store: Any, *, epoch: int, rank: int, world: int, check: Callable[[], None]) -> None:
        self._rank = rank
        self._world = world
        self._check = check
        self._turn = 0
        self._memory = _share(store, f"host-memory-{epoch}", rank, world, world * (COUNTER_BYTES + 2 * HALF_BYTES))
        counters = np.frombuffer(self._memory, dtype=np.int64, count=world * COUNTER_BYTES // 8)
        self._counters = counters[:: COUNTER_BYTES // 8]
        regions = torch.frombuffer(self._memory, dtype=torch.uint8, offset=world * COUNTER_BYTES)
        self._halves = regions.view(world, 2, HALF_BYTES)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether one call can carry the tensor: the same answer on every rank."""
        return tensor.nbytes <= HALF_BYTES

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `tensor` (same shape and dtype), in rank order, as views that are valid until the next call but one."""
        self._turn += 1
        half, size = self._turn % 2, tensor.nbytes
        if size:
            self._halves[self._rank, half, :size].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        self._counters[self._rank] = self._turn
        self._wait()
        parts = self._halves[:, half, :size].view(tensor.dtype)
        return [parts[rank].view(tensor.shape) for rank in range(self._world)]

    def _wait(self) -> None:
        counters, turn = self._counters, self._turn
        looks = 0
        checked = 0.0
        for rank in range(self._world):
            while counters[rank] < turn:
                looks += 1
                if looks <= SPINS:
                    continue
                if looks <= SPINS + YIELDS:
                    os.sched_yield()
                    continue
                now = time.monotonic()
                if now - checked > CHECK_S:
                    checked = now
                    self._check()
                time.sleep(NAP_S)


def _share(store: Any, name: str, rank: int, world: int, size: int) -> mmap.mmap:
    """The same zeroed memory on every rank. Its file has no name any more when this ends on rank 0, by an error too."""
    if rank != 0:
        memory = _map(os.open(store.get(name).decode(), os.O_RDWR), size)
        store.set(f"{name}-opened-{rank}", b"1")
        return memory
    descriptor, path = _reserve(size)
    try:
        memory = _map(descriptor, size)
        store.set(name, path)
        for other in range(1, world):
            store.get(f"{name}-opened-{other}")
    finally:
        os.unlink(path)
    return memory


def _reserve(size: int) -> tuple[int, str]:
    """A new file of `size` zero bytes: in /dev/shm, or where that has no room (64 MiB in a container), in the temporary folder.

    The bytes are taken at once: touching a page that the file system cannot give would kill the process.
    """
    shared = Path("/dev/shm")
    try:
        return _new_file(shared if shared.is_dir() else None, size)
    except OSError as error:
        log.warning("no %d bytes of shared memory in %s: %s", size, shared, error)
        return _new_file(None, size)


def _new_file(folder: Path | None, size: int) -> tuple[int, str]:
    descriptor, path = tempfile.mkstemp(prefix="ep_runtime-", dir=folder)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        os.unlink(path)
        raise
    return descriptor, path


def _map(descriptor: int, size: int) -> mmap.mmap:
    """The file's memory; the descriptor is closed."""
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
