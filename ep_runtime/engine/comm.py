"""The tensor collectives of one epoch: a process group of this epoch alone, and the only object that launches on it.

Groups are built from a fresh rendezvous store and held by this object, never in torch's global registry: leaving an epoch is
dropping the object. Every call is counted, so that ranks can compare how many collectives a command launched.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from ep_runtime.engine.host_memory import HostMemory

if TYPE_CHECKING:
    from ep_runtime.engine.peers import Peers
    from kernels.one_shot_triton import PeerMemory

# torch's type stubs leave out stores and process groups.
_torch: Any = distributed

WAIT_SLICE = datetime.timedelta(milliseconds=20)


class GroupCommunicator:
    """Collectives over Gloo (CPU tensors) or NCCL (CUDA tensors); see `model.base.Communicator` for the contract.

    What fits goes through memory that the ranks of one host share, once they have joined it: `join_host` on the CPU, `join_peers`
    on GPUs. Whether it fits follows from its shape and dtype alone.

    Sums gather every rank's partial and add them in rank order in float32: the same bits on all ranks, and for a row the same bits
    whatever else is in the batch, which a ring reduction does not give.

    `check` raises `EpLinkLost` when the epoch is over or a rank is lost. A wait on the host calls it every 20 ms: Gloo itself
    notices a dead peer, but not one that has failed and left.
    """

    def __init__(self, group: Any, rank: int, world: int, device: torch.device, check: Callable[[], None]) -> None:
        self.rank = rank
        self.world = world
        self.launched = 0
        self.peers: PeerMemory | None = None
        self._shared: list[Peers] = []
        self._host: HostMemory | None = None
        self._group = group
        self._device = device
        self._check = check
        self._pending: Any = None

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' `partial`, in rank order, in `partial`'s dtype."""
        self.launched += 1
        first, *others = self._gather(partial)
        total = first.to(torch.float32, copy=True)
        for part in others:
            total += part
        return total.to(partial.dtype)

    def join_host(self, store: Any, epoch: int) -> None:
        """Share memory with the other ranks of this host, so that small tensors need no sockets. Every rank calls it."""
        self._host = HostMemory(store, epoch=epoch, rank=self.rank, world=self.world, check=self._check)

    def join_peers(self, store: Any, epoch: int, dtype: torch.dtype) -> None:
        """Show this rank's memory to the other GPUs of the host, and see theirs. Every rank calls it."""
        from ep_runtime.engine.peers import Peers

        self._shared = [Peers(self.rank, self.world, self._device, dtype, use) for use in ("sums", "logits")]
        for peers in self._shared:
            peers.connect(store, epoch)
        self.peers = self._shared[0].memory

    def gather_to_head(self, shard: torch.Tensor) -> list[torch.Tensor] | None:
        """All ranks' shards in rank order on rank 0, None elsewhere. Through peer memory they come as one tensor, side by side."""
        self.launched += 1
        if self._shared:
            from kernels.one_shot_triton import gather_rows

            memory = self._shared[1].memory
            if memory.fits_gather(*shard.shape):
                gathered = gather_rows(memory, shard)
                return [gathered] if self.rank == 0 else None
        if self._device.type == "cuda":
            parts = self._gather(shard)
            return parts if self.rank == 0 else None
        if self._host is not None and self._host.fits(shard):
            parts = self._host.exchange(shard)
            return parts if self.rank == 0 else None
        shard = shard.contiguous()
        parts = [torch.empty_like(shard) for _ in range(self.world)] if self.rank == 0 else []
        self._wait(self._group.gather(parts, shard, 0))
        return parts if self.rank == 0 else None

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's contiguous `tensor` overwrites every rank's."""
        self.launched += 1
        if self._host is not None and self._host.fits(tensor):
            parts = self._host.exchange(tensor)
            if self.rank != 0:
                tensor.copy_(parts[0])
            return
        self._wait(self._group.broadcast(tensor, 0))

    def close(self) -> None:
        """Leave the group by dropping it.

        An operation that is still pending on the host would keep the destructor waiting for its timeout: the group is then left
        to a thread that does the waiting.
        """
        for peers in self._shared:
            peers.abort()
        self.peers, self._shared, self._host = None, [], None
        group, self._group = self._group, None
        if self._pending is not None:
            threading.Thread(target=_outlive, args=(group, self._pending), name="parked group", daemon=True).start()

    def _wait(self, work: Any) -> None:
        if self._device.type == "cuda":
            # Orders the stream behind the collective; the host does not wait.
            work.wait()
            return
        self._pending = work
        while not _finished(work):
            self._check()
        self._pending = None

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        tensor = tensor.contiguous()
        if self._device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a graph holds no NCCL, and this does not go through peer memory")
            out = torch.empty((self.world, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
            self._wait(self._group._allgather_base(out, tensor))
            return list(out.unbind(0))
        if self._host is not None and self._host.fits(tensor):
            return self._host.exchange(tensor)
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        self._wait(self._group.allgather([parts], [tensor]))
        return parts


def _finished(work: Any) -> bool:
    """Wait up to 20 ms for a Gloo operation. Raises what the operation raised."""
    try:
        work.wait(WAIT_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        # It ended after the wait gave up, or gave an error: waiting again tells which.
        work.wait()
    return True


def _outlive(group: Any, pending: Any) -> None:
    """Hold the group until its last operation ends, by success, error or timeout: none of them matters any more."""
    while not pending.is_completed():
        time.sleep(1.0)


def open_store(host: str, world: int) -> tuple[Any, str]:
    """A fresh rendezvous store served by this process on a free port of `host`, and its address `host:port`."""
    store = _torch.TCPStore(host, 0, world, is_master=True, wait_for_workers=False)
    return store, f"{host}:{store.port}"


def connect_store(address: str, world: int, timeout_s: float) -> Any:
    """The store that the head opened for this epoch."""
    host, port = address.rsplit(":", 1)
    timeout = datetime.timedelta(seconds=timeout_s)
    return _torch.TCPStore(host, int(port), world, is_master=False, wait_for_workers=False, timeout=timeout)


def form_group(
    store: Any,
    *,
    epoch: int,
    rank: int,
    world: int,
    device: torch.device,
    host: str,
    timeout_s: float,
    check: Callable[[], None],
) -> GroupCommunicator:
    """Join this epoch's process group.

    `host` is an address of this machine that the other ranks reach (loopback when all share a host); Gloo would otherwise bind what
    the hostname resolves to.

    Raises:
        RuntimeError: a rank did not come within `timeout_s`.
    """
    prefixed = _torch.PrefixStore(f"epoch-{epoch}", store)
    timeout = datetime.timedelta(seconds=timeout_s)
    if device.type == "cuda":
        options = _torch.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = _torch.ProcessGroupNCCL(prefixed, rank, world, options)
    else:
        options = _torch.ProcessGroupGloo._Options()
        options._devices = [_torch.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        group = _torch.ProcessGroupGloo(prefixed, rank, world, options)
    return GroupCommunicator(group, rank, world, device, check)
