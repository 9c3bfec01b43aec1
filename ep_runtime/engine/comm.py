"""The tensor collectives of one epoch: a process group of this epoch alone, and the only object that launches on it.

Groups are built from a fresh rendezvous store and held by this object, never in torch's global registry: leaving an epoch is
dropping the object. Every call is counted, so that ranks can compare how many collectives a command launched.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from ep_runtime.engine.endable import endable
from ep_runtime.engine.host_memory import CHECK_S, Exchange, HostMemory, share_memory
from ep_runtime.engine.nccl import NcclGroup
from protocol.ack import ErrorCode, error_code
from protocol.errors import EpPeerGone
from protocol.progress import ProgressPage

if TYPE_CHECKING:
    from ep_runtime.engine.peers import Peers
    from kernels.peer_memory import PeerMemory

log = logging.getLogger(__name__)

# torch's type stubs leave out stores and process groups.
_torch: Any = distributed

WAIT_SLICE = datetime.timedelta(milliseconds=20)

CONNECT_SECONDS = 10.0
"""For ranks that are all about to connect over Gloo. A wait for one that dies just then cannot be cut short: this ends it."""

STORE_TRIES_S = (0.5, 1.0, 2.0, 4.0)
"""Time limits of the tries to connect to a store. Now and then one gets no answer from a store that is there, and the next does.

torch takes up to twice a limit, also where `check` has ended the wait for it.
"""

PARKED_POLL_S = 0.05
SETTLE_POLL_S = 100e-6


class GroupCommunicator:
    """Collectives over Gloo (CPU tensors) or NCCL (CUDA tensors); see `model.base.Communicator` for the contract.

    What fits goes through memory that the ranks of one host share, once they have joined it: `join_host` on the CPU, `join_peers`
    on GPUs. Whether it fits follows from its shape and dtype alone.

    Sums gather every rank's partial and add them in rank order in float32: the same bits on all ranks, and for a row the same bits
    whatever else is in the batch, which a ring reduction does not give.

    `check` raises `EpLinkLost` when the epoch is over or a rank is lost. It is called every 20 ms by waits on the host, since Gloo
    itself notices a dead peer, but not one that has failed and left, and by launches, for a forward that never waits.
    """

    def __init__(
        self, group: Any, rank: int, world: int, device: torch.device, check: Callable[[], None], page: ProgressPage | None = None
    ) -> None:
        self.rank = rank
        self.world = world
        self.peers: PeerMemory | None = None
        self.shards: PeerMemory | None = None
        self._launched = 0
        self._page = ProgressPage() if page is None else page
        self._shared: list[Peers] = []
        self._host: HostMemory | None = None
        self._nccl: NcclGroup | None = group if isinstance(group, NcclGroup) else None
        self._group = group.group if isinstance(group, NcclGroup) else group
        self._device = device
        self._check = check
        self._checked = 0.0
        self._pending: Any = None

    @property
    def launched(self) -> int:
        """Collectives launched so far; whoever launches one elsewhere adds it."""
        return self._launched

    @launched.setter
    def launched(self, count: int) -> None:
        if count > self._launched:
            self._page.collective(count - self._launched)
        self._launched = count

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' `partial`, in rank order, in `partial`'s dtype."""
        self._launch()
        first, *others = self._gather(partial)
        total = first.to(torch.float32, copy=True)
        for part in others:
            total += part
        return total.to(partial.dtype)

    def join_host(self, exchange: Exchange, timeout_s: float) -> None:
        """Share memory with the other ranks of this host, so that small tensors need no sockets. Every rank calls it.

        `timeout_s` ends a wait there that nothing else has ended, as that of `form_group` does over Gloo.
        """
        self._host = share_memory(exchange, rank=self.rank, world=self.world, check=self._check, timeout_s=timeout_s)

    def join_peers(self, exchange: Exchange, peers: list[Peers]) -> None:
        """Show this rank's memory (for sums, logits, shards) to the other GPUs of the host, and see theirs. Every rank calls it."""
        self._shared = peers
        for memory in peers:
            memory.connect(exchange)
        self.peers = peers[0].memory
        self.shards = peers[2].memory if len(peers) > 2 else None

    def gather_to_head(self, shard: torch.Tensor) -> list[torch.Tensor] | None:
        """All ranks' shards in rank order on rank 0, None elsewhere. Through peer memory they come as one tensor, side by side."""
        self._launch()
        if self._shared:
            from kernels.peer_gather_triton import gather_rows

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
        self._launch()
        if self._host is not None and self._host.fits(tensor):
            parts = self._host.exchange(tensor)
            if self.rank != 0:
                tensor.copy_(parts[0])
            return
        self._wait(self._group.broadcast(tensor, 0))

    def feed(self, tokens: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor) -> None:
        """Rank 0's `tokens [n]` go into every rank's `last_tokens[slots]`, all int64 on the device."""
        if self.shards is not None:
            from kernels.shards_triton import SENT_TOKENS, send_tokens

            if len(tokens) <= SENT_TOKENS:
                self._launch()
                send_tokens(self.shards, tokens, slots, last_tokens)
                return
        tokens = tokens.contiguous()
        self.broadcast(tokens)
        last_tokens.index_copy_(0, slots, tokens)

    def settle(self) -> None:
        """Return when the device is done, looking at the epoch meanwhile: before anything that would wait for it blindly."""
        if self._device.type != "cuda":
            return
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        while not done.query():
            self._look()
            time.sleep(SETTLE_POLL_S)

    def close(self) -> None:
        """Leave the group by dropping it, with whatever is in flight. Idempotent.

        On a GPU it returns when the device is done, so that what the epoch held there can be freed. On the CPU an operation that is
        still pending would keep the group's destructor waiting: the group is then left to a thread that does the waiting.

        Raises:
            DeviceStuckError: the device is not done in time.
        """
        for peers in self._shared:
            peers.abort()
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            self._group = None
            nccl.leave()
        for peers in self._shared:
            peers.disconnect()
        self.peers, self.shards, self._shared, self._host = None, None, [], None
        group, self._group = self._group, None
        pending, self._pending = self._pending, None
        if pending is not None:
            threading.Thread(target=_outlive, args=(group, pending), name="parked group", daemon=True).start()

    def _launch(self) -> None:
        self.launched += 1
        self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._checked > CHECK_S:
            self._checked = now
            self._check()

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
        time.sleep(PARKED_POLL_S)


def open_store(host: str, world: int) -> tuple[Any, str]:
    """A fresh rendezvous store served by this process on a free port of `host`, and its address `host:port`."""
    store = _tried(lambda limit: _torch.TCPStore(host, 0, world, is_master=True, wait_for_workers=False, timeout=limit))
    return store, f"{host}:{store.port}"


def connect_store(address: str, world: int, timeout_s: float, patience_s: float = STORE_TRIES_S[-1]) -> Any:
    """The store at `address`. `timeout_s` is for what is asked of it, `patience_s` for the last try to connect.

    It blocks where `endable` alone can end it. Raises:
        RuntimeError: no try was answered.
    """
    host, port = address.rsplit(":", 1)

    def connect(limit: datetime.timedelta) -> Any:
        return _torch.TCPStore(host, int(port), world, is_master=False, wait_for_workers=False, timeout=limit)

    store = _tried(connect, patience_s)
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def _tried(connect: Callable[[datetime.timedelta], Any], patience_s: float = STORE_TRIES_S[-1]) -> Any:
    """What `connect` returns within one of the limits of STORE_TRIES_S, the last of which is `patience_s`; what the last raises."""
    for seconds in STORE_TRIES_S[:-1]:
        try:
            return connect(datetime.timedelta(seconds=seconds))
        except RuntimeError as error:
            log.info("no answer of a rendezvous store within %g s, once more: %s", seconds, str(error).partition("\n")[0])
    return connect(datetime.timedelta(seconds=patience_s))


def form_group(
    address: str,
    *,
    epoch: int,
    rank: int,
    world: int,
    device: torch.device,
    host: str,
    timeout_s: float,
    check: Callable[[], None],
    page: ProgressPage | None = None,
) -> GroupCommunicator:
    """Join this epoch's process group through the store at `address`. The ranks have met before: all of them call it now.

    `host` is an address of this machine that the other ranks reach (loopback when all share a host); Gloo would otherwise bind what
    the hostname resolves to. `timeout_s` ends a collective over Gloo that nothing else has ended.

    Raises:
        EpLinkLost: what `check` raised, or `EpPeerGone` when the ranks could not connect.
        DeviceStuckError: the GPU does not finish what was launched while joining.
    """

    def store() -> Any:
        return _torch.PrefixStore(f"epoch-{epoch}", connect_store(address, world, timeout_s))

    try:
        if device.type == "cuda":
            group: Any = NcclGroup(store, rank=rank, world=world, device=device, timeout_s=timeout_s, check=check)
        else:
            group = endable(lambda: _gloo_group(store(), rank, world, host, timeout_s), check, "joining a group")
    except RuntimeError as error:
        check()
        if error_code(error) in (ErrorCode.RUNTIME, ErrorCode.LINK):
            raise EpPeerGone(f"rank {rank} could not join the group of epoch {epoch}: {error}") from error
        raise
    return GroupCommunicator(group, rank, world, device, check, page)


def _gloo_group(store: Any, rank: int, world: int, host: str, timeout_s: float) -> Any:
    options = _torch.ProcessGroupGloo._Options()
    options._devices = [_torch.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = datetime.timedelta(seconds=CONNECT_SECONDS)
    group = _torch.ProcessGroupGloo(store, rank, world, options)
    group._set_default_timeout(datetime.timedelta(seconds=timeout_s))
    return group
