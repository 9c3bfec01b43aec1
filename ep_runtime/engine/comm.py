"""The tensor collectives of one epoch: a process group of this epoch alone, and the only object that launches on it.

Groups are built from a fresh rendezvous store and held by this object, never in torch's global registry: leaving an epoch is
dropping the object. Every call is counted, so that ranks can compare how many collectives a command launched.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch import distributed

# torch's type stubs leave out stores and _torch.
_torch: Any = distributed


class GroupCommunicator:
    """Collectives over Gloo (CPU tensors) or NCCL (CUDA tensors); see `model.base.Communicator` for the contract.

    Sums gather every rank's partial and add them in rank order in float32: the same bits on all ranks, and for a row the same bits
    whatever else is in the batch, which a ring reduction does not give.
    """

    def __init__(self, group: Any, rank: int, world: int, device: torch.device) -> None:
        self.rank = rank
        self.world = world
        self.launched = 0
        self._group = group
        self._device = device

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' `partial`, in rank order, in `partial`'s dtype."""
        self.launched += 1
        parts = self._gather(partial)
        total = parts[0].float() if partial.dtype != torch.float32 else parts[0]
        for part in parts[1:]:
            total += part
        return total.to(partial.dtype)

    def gather_to_head(self, shard: torch.Tensor) -> list[torch.Tensor] | None:
        """All ranks' shards in rank order on rank 0, None elsewhere."""
        self.launched += 1
        if self._device.type == "cuda":
            parts = self._gather(shard)
            return parts if self.rank == 0 else None
        shard = shard.contiguous()
        parts = [torch.empty_like(shard) for _ in range(self.world)] if self.rank == 0 else []
        self._group.gather(parts, shard, 0).wait()
        return parts if self.rank == 0 else None

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's contiguous `tensor` overwrites every rank's."""
        self.launched += 1
        self._group.broadcast(tensor, 0).wait()

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        tensor = tensor.contiguous()
        if self._device.type == "cuda":
            out = torch.empty((self.world, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
            self._group._allgather_base(out, tensor).wait()
            return list(out.unbind(0))
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        self._group.allgather([parts], [tensor]).wait()
        return parts


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
    store: Any, *, epoch: int, rank: int, world: int, device: torch.device, host: str, timeout_s: float
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
    return GroupCommunicator(group, rank, world, device)
