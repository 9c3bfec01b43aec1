"""Memory that the GPUs of one host show each other, for the reductions of `kernels.one_shot_triton`.

Each rank allocates a buffer and signals, and sends CUDA IPC handles to the others through the epoch's store. `connect` clears the
counters and fills the device tables in place, so that graphs that read them stay valid when it is called again.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from kernels.one_shot_triton import PROGRAMS, PeerMemory

BUFFER_BYTES = {"sums": 64 << 20, "logits": 128 << 20}
"""By use. Logits: 256 rows of a two-rank shard of a vocabulary of 150,000 in bfloat16, twice."""


class Peers:
    """This rank's shared memory for one use, and its view of the others'. `abort` is the host's way to end a wait on the device."""

    def __init__(self, rank: int, world: int, device: torch.device, dtype: torch.dtype, use: str) -> None:
        self._rank = rank
        self._use = use
        self._world = world
        self._device = device
        self._buffer = torch.zeros(BUFFER_BYTES[use], dtype=torch.uint8, device=device)
        self._signals = torch.zeros(PROGRAMS * world, dtype=torch.int32, device=device)
        self._turns = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        self._tables = torch.zeros(2, world, dtype=torch.int64, device=device)
        self._abort = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._opened: list[torch.UntypedStorage] = []
        self.memory = PeerMemory(
            rank=rank,
            world=world,
            buffers=self._tables[0],
            signals=self._tables[1],
            turns=self._turns,
            abort=self._abort,
            capacity=BUFFER_BYTES[use] // 2 // dtype.itemsize,
        )

    def connect(self, store: Any, epoch: int) -> None:
        """Exchange handles through the epoch's store and fill the tables. Every rank calls it; none may reduce before it returns.

        Raises:
            RuntimeError: a peer did not come within the store's timeout, or its memory cannot be mapped.
        """
        self._abort.zero_()
        self._signals.zero_()
        self._turns.zero_()
        torch.cuda.synchronize(self._device)
        own = [list(tensor.untyped_storage()._share_cuda_())[1:] for tensor in (self._buffer, self._signals)]
        store.set(f"peers-{self._use}-{epoch}-{self._rank}", msgspec.msgpack.encode(own))
        self._opened = []
        addresses = torch.zeros(2, self._world, dtype=torch.int64)
        for rank in range(self._world):
            for kind, tensor in enumerate((self._buffer, self._signals)):
                addresses[kind, rank] = tensor.data_ptr() if rank == self._rank else self._open(store, epoch, rank, kind)
        self._tables.copy_(addresses)
        torch.cuda.synchronize(self._device)
        self._meet(store, epoch)

    def abort(self) -> None:
        """End every wait of this rank's kernels, now and from now on, until the next `connect`."""
        self._abort.fill_(1)

    def _open(self, store: Any, epoch: int, rank: int, kind: int) -> int:
        handle = msgspec.msgpack.decode(store.get(f"peers-{self._use}-{epoch}-{rank}"))[kind]
        # The storage is opened for this rank's device, which reaches the peer's memory over the link between them.
        storage = torch.UntypedStorage._new_shared_cuda(self._device.index, *handle)
        self._opened.append(storage)
        return int(storage.data_ptr())

    def _meet(self, store: Any, epoch: int) -> None:
        """Return when every rank has cleared its counters: an early signal would be lost."""
        store.set(f"peers-{self._use}-met-{epoch}-{self._rank}", b"1")
        for rank in range(self._world):
            store.get(f"peers-{self._use}-met-{epoch}-{rank}")
