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
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch

from protocol.errors import EpDeadline

log = logging.getLogger(__name__)

Exchange = Callable[[bytes], list[bytes]]
"""Gives this rank's bytes to every rank and returns everybody's, in rank order, when all have given theirs."""

HALF_BYTES = 8 << 20
"""Of one rank's half; larger tensors go through sockets."""

COUNTER_BYTES = 64
"""A cache line each, so that waiting for one rank does not slow another's counter down."""

NONCE_BYTES = 16
"""At the end of the memory: what a rank has mapped is what the head offered, and not what bears the same name to it."""

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
    """One rank's view of the shared regions. `check` raises when the epoch is over; a wait calls it every 20 ms.

    `EpDeadline` ends a wait of `timeout_s` seconds that nothing else has ended.
    """

    def __init__(self, memory: mmap.mmap, *, rank: int, world: int, check: Callable[[], None], timeout_s: float) -> None:
        self._rank = rank
        self._world = world
        self._check = check
        self._timeout_s = timeout_s
        self._turn = 0
        counters = np.frombuffer(memory, dtype=np.int64, count=world * COUNTER_BYTES // 8)
        self._counters = counters[:: COUNTER_BYTES // 8]
        regions = torch.frombuffer(memory, dtype=torch.uint8, offset=world * COUNTER_BYTES, count=world * 2 * HALF_BYTES)
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
        checked, checks = 0.0, 0
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
                    # Checks are counted, and not seconds: those in which this process stood still do not count.
                    checks += 1
                    if checks * CHECK_S > self._timeout_s:
                        raise EpDeadline(f"rank {rank} did not come to a collective within {self._timeout_s:g} s")
                time.sleep(NAP_S)


def share_memory(exchange: Exchange, *, rank: int, world: int, check: Callable[[], None], timeout_s: float) -> HostMemory | None:
    """Zeroed memory of all ranks, which every rank asks for; None on all of them when any of them cannot map it.

    It has no name in any file system: it ends with the last process that maps it, however that ends.
    """
    with ExitStack() as until_mapped:
        memory, offer = None, b""
        if rank == 0:
            memory, descriptor, offer = _offer(_size(world))
            until_mapped.callback(os.close, descriptor)
        offered = exchange(offer)[0]
        if rank != 0:
            memory = _map_offered(offered, _size(world))
        mapped = exchange(b"" if memory is None else b"mapped")
    missing = [str(number) for number, said in enumerate(mapped) if not said]
    if missing:
        if rank == 0:
            log.warning("ranks %s cannot map shared memory: sums go through sockets", ", ".join(missing))
        return None
    assert memory is not None
    return HostMemory(memory, rank=rank, world=world, check=check, timeout_s=timeout_s)


def _size(world: int) -> int:
    return world * (COUNTER_BYTES + 2 * HALF_BYTES) + NONCE_BYTES


def _offer(size: int) -> tuple[mmap.mmap | None, int, bytes]:
    """New memory, its descriptor, and how another process finds it: the nonce at its end, then a path. No memory: empty words.

    Its bytes are taken at once: touching a page that the system cannot give would kill the process.
    """
    descriptor = os.memfd_create("ep_runtime-sums", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
        memory = mmap.mmap(descriptor, size)
    except OSError as error:
        log.warning("no %d bytes of shared memory: %s", size, error)
        return None, descriptor, b""
    nonce = secrets.token_bytes(NONCE_BYTES)
    memory[size - NONCE_BYTES :] = nonce
    return memory, descriptor, nonce + f"/proc/{os.getpid()}/fd/{descriptor}".encode()


def _map_offered(offer: bytes, size: int) -> mmap.mmap | None:
    """The head's memory; None where it offers none, or where this process finds something else by that name."""
    nonce, path = offer[:NONCE_BYTES], offer[NONCE_BYTES:].decode()
    if not path:
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        log.warning("%s: %s", path, error)
        return None
    try:
        memory = mmap.mmap(descriptor, size) if os.fstat(descriptor).st_size == size else None
    finally:
        os.close(descriptor)
    return memory if memory is not None and memory[size - NONCE_BYTES :] == nonce else None
