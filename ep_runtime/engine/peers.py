"""Memory that the GPUs of one host show each other: for `kernels.peer_sums`, `kernels.peer_gather_triton`, `kernels.shards_triton`.

Each rank allocates a buffer and signals once for the life of its process: a peer that leaves an epoch late may still write into
them, and must not meet another tensor there. In each epoch the ranks exchange CUDA IPC handles, `connect` clears the counters and
fills the device tables in place, so that graphs that read them stay valid.
"""

from __future__ import annotations

import msgspec
import torch

from ep_runtime.engine.host_memory import Exchange
from kernels.peer_memory import PROGRAMS, SIGNAL_LINE, WORD_ROWS, PeerMemory
from kernels.shards_triton import shard_words
from protocol.errors import EpPeerGone

BUFFER_BYTES = {"sums": 96 << 20, "logits": 128 << 20, "shards": 64 << 20}
"""By use. Sums, for each peer: 12,288 rows of 2048 elements in bfloat16, twice. Logits that are gathered: 256 rows of a
two-rank shard of a vocabulary of 250,000 in bfloat16, twice. Shards that stay where they are: 256 such rows, once."""

WORD_BYTES = 32 << 20
"""For sums of a few rows, which go in words: 256 rows of 2048 elements in bfloat16 from each of eight ranks, twice."""

FEWER_PROGRAMS = 256
"""Programs of a launch that gathers, or sums over more than two ranks: each holds a part of every rank in registers."""

_EVENT_WAIT = 6
"""Place, in a handle, of whether its reader waits for an event of the writer: both have waited for their devices instead."""


def shared_bytes(use: str, world: int) -> tuple[int, int]:
    """Bytes of a rank's buffer, and of the words behind it."""
    if use == "sums":
        return BUFFER_BYTES[use] * max(1, world - 1), WORD_BYTES
    return BUFFER_BYTES[use], 8 * shard_words(world) if use == "shards" else 0


class Peers:
    """This rank's shared memory for one use, and its view of the others'. `abort` is the host's way to end a wait on the device."""

    def __init__(self, rank: int, world: int, device: torch.device, dtype: torch.dtype, use: str) -> None:
        self._rank = rank
        self._world = world
        self._device = device
        size, words = shared_bytes(use, world)
        self._buffer = torch.zeros(size + words, dtype=torch.uint8, device=device)
        self._words = self._buffer[size:]
        self._signals = torch.zeros(PROGRAMS * SIGNAL_LINE, dtype=torch.int32, device=device)
        self._turns = torch.zeros(2 * PROGRAMS, dtype=torch.int32, device=device)
        self._tables = torch.zeros(2, world, dtype=torch.int64, device=device)
        # On the meta device it can be neither pinned nor shown: kernels are compiled for it there, and that is all.
        real = device.type == "cuda"
        self._abort = torch.zeros(1, dtype=torch.int32, pin_memory=real)
        self._handles = [_handle(tensor) for tensor in (self._buffer, self._signals)] if real else []
        self._opened: list[torch.UntypedStorage] = []
        self.memory = PeerMemory(
            rank=rank,
            world=world,
            buffers=self._tables[0],
            signals=self._tables[1],
            turns=self._turns,
            abort=self._abort,
            capacity=size // 2 // dtype.itemsize,
            programs=PROGRAMS if use == "sums" and world == 2 else FEWER_PROGRAMS,
            words_at=size // 8,
            slot=words // 8 // 2 // world // 2 * 2,
            # Words of a row go to every peer, twice its bytes: more peers, fewer rows that are sooner there than by a second way.
            word_rows=WORD_ROWS // max(1, world - 1),
            two_shots=world > 2,
            shown=self._buffer[:size].view(dtype) if use == "shards" else None,
        )

    def connect(self, exchange: Exchange) -> None:
        """Show the memory to the others of this epoch and see theirs. Every rank calls it; none may reduce before it returns.

        The device must be done with the epoch before. Raises `EpPeerGone` when a peer's memory cannot be mapped.
        """
        self.disconnect()
        self._abort.zero_()
        torch.cuda.synchronize(self._device)
        shown = [msgspec.msgpack.decode(blob) for blob in exchange(msgspec.msgpack.encode(self._handles))]
        # Every rank's device is done: nobody writes here any more what belongs to an earlier epoch.
        for counters in (self._signals, self._turns, self._words):
            counters.zero_()
        addresses = torch.zeros(2, self._world, dtype=torch.int64)
        for rank in range(self._world):
            for kind, tensor in enumerate((self._buffer, self._signals)):
                addresses[kind, rank] = tensor.data_ptr() if rank == self._rank else self._open(rank, shown[rank][kind])
        self._tables.copy_(addresses)
        torch.cuda.synchronize(self._device)
        exchange(b"")  # an early signal would be lost: it may come when every rank has cleared its counters

    def abort(self) -> None:
        """End every wait of this rank's kernels, now and from now on, until the next `connect`."""
        self._abort.fill_(1)

    def disconnect(self) -> None:
        """Close the view of the others' memory. The device must be done: its kernels may write there until then."""
        self._opened.clear()

    def _open(self, rank: int, handle: list[object]) -> int:
        # The storage is opened for this rank's device, which reaches the peer's memory over the link between them.
        try:
            storage = torch.UntypedStorage._new_shared_cuda(self._device.index, *handle)
        except RuntimeError as error:
            torch.cuda.synchronize(self._device)  # raises, if it is this device that has failed
            raise EpPeerGone(f"the memory of rank {rank} cannot be mapped: {error}") from None
        self._opened.append(storage)
        return int(storage.data_ptr())


def _handle(tensor: torch.Tensor) -> list[object]:
    """How another process opens the tensor's memory: torch's IPC tuple without the device."""
    handle: list[object] = list(tensor.untyped_storage()._share_cuda_())[1:]
    handle[_EVENT_WAIT] = False
    return handle
