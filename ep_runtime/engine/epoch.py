"""One epoch of one rank: links, handshake, communicator, state, and the loop that it runs.

Both ends go the same way: connect the links, agree on the blocks of the cache, compare fingerprints, form the tensor group,
allocate. Whoever leaves closes its links first: a collective that is cut short has computed garbage, and the head must see that the
rank has left before it could read that.
"""

from __future__ import annotations

import logging
import platform
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Annotated

import msgspec
import torch

from ep_runtime.engine import host_memory
from ep_runtime.engine.broadcast import Broadcaster
from ep_runtime.engine.comm import form_group
from ep_runtime.engine.executor import EpochCommunicator, Executor
from ep_runtime.engine.host_memory import Exchange
from ep_runtime.engine.rank import RankModel
from ep_runtime.engine.worker import Worker
from model.base import SingleRank
from model.state.registry import StateRegistry
from protocol.errors import EpFrameCorrupt, brief
from protocol.handshake import Fingerprint, head_handshake, worker_handshake
from protocol.links import HeadLinks, WorkerLink
from protocol.listener import Listener
from protocol.messages import MESSAGES_VERSION
from protocol.progress import ProgressPage
from protocol.slots import SlotLimits, SlotTable

log = logging.getLogger(__name__)

DISTRIBUTION = "ep-runtime"

BACKSTOP_SECONDS = 5.0
"""Beyond a command's deadline, before the head itself gives up: the coordinator, who sees every rank, judges first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochPlace:
    """Where an epoch meets. `store` is `host:port`, `links` an address of `protocol.address`; both empty in a world of one."""

    epoch: int
    world: int
    store: str
    links: str
    token: str
    host: str = "127.0.0.1"

    @property
    def one_host(self) -> bool:
        """True when all ranks are on this host."""
        return self.host == "127.0.0.1"


class LoneRank(SingleRank):
    """A world of one has no group."""

    def feed(self, tokens: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor) -> None:
        """The tokens are here already."""
        last_tokens.index_copy_(0, slots, tokens)

    def close(self) -> None:
        """There is no group to leave."""


class RankEpoch:
    """What one rank owns for one epoch. `close` tears it down, newest first."""

    def __init__(self, rank: RankModel, place: EpochPlace, comm: EpochCommunicator, num_blocks: int) -> None:
        config = rank.config
        self.place = place
        self.limits = SlotLimits(
            max_slots=rank.plan.max_slots,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_length=rank.max_model_len,
            max_rows=config.max_num_batched_tokens or 0,
            world=place.world,
            max_vision_rows=rank.max_image_tokens,
            recurrent=not rank.spec.rewindable,
            max_loops=rank.spec.max_loops,
            owners=rank.owners,
        )
        self.slots = SlotTable(self.limits)
        self.state = StateRegistry(
            rank.spec,
            max_slots=self.limits.slots_of_owner,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=rank.dtype,
            device=rank.device,
        )
        self.executor = Executor(
            rank.loaded.model,
            self.state,
            comm,
            self.limits,
            rank.device,
            dtype=rank.dtype,
            graphs=config.forward_mode == "graph",
        )

    def close(self) -> None:
        """Leave the communicator, free every slot and drop the state."""
        self.executor.close()
        self.slots.clear_all()
        self.state.close()


def open_head(
    rank: RankModel,
    place: EpochPlace,
    listener: Listener | None,
    closed: Callable[[], bool],
    page: ProgressPage | None = None,
) -> tuple[RankEpoch, Broadcaster, HeadLinks]:
    """The head's end of a new epoch; `listener` waits where `place.links` says, and is None in a world of one.

    Raises:
        EpLinkLost: a rank did not come, differs from the head, or was lost on the way.
    """
    config = rank.config
    deadline = time.monotonic() + config.handshake_timeout
    with ExitStack() as undo:
        if listener is None:
            links = HeadLinks([], place.epoch, closed)
        else:
            links = listener.accept(
                world=place.world,
                epoch=place.epoch,
                token=place.token,
                deadline=deadline,
                closed=closed,
                on_refused=log.warning,
                version=config.protocol,
            )
        undo.callback(links.close)
        epoch = _join(rank, place, links, partial(head_handshake, links), deadline, page)
        undo.pop_all()
    broadcaster = Broadcaster(
        epoch.executor,
        links,
        epoch.slots,
        epoch=place.epoch,
        version=config.protocol,
        deadline_s=config.command_timeout + BACKSTOP_SECONDS,
        page=page,
    )
    return epoch, broadcaster, links


def open_worker(
    rank: RankModel, place: EpochPlace, closed: Callable[[], bool], page: ProgressPage | None = None
) -> tuple[RankEpoch, Worker, WorkerLink]:
    """A worker's end of a new epoch. Raises as `open_head`."""
    config = rank.config
    deadline = time.monotonic() + config.handshake_timeout
    link = WorkerLink.connect(
        place.links,
        rank=rank.parallel.rank,
        epoch=place.epoch,
        token=place.token,
        deadline=deadline,
        closed=closed,
        version=config.protocol,
    )
    with ExitStack() as undo:
        undo.callback(link.close)
        epoch = _join(rank, place, link, partial(worker_handshake, link), deadline, page)
        undo.pop_all()
    return epoch, Worker(epoch.executor, link, version=config.protocol, device=rank.device, page=page), link


def _join(
    rank: RankModel,
    place: EpochPlace,
    link: HeadLinks | WorkerLink,
    handshake: Callable[[Fingerprint, float], None],
    deadline: float,
    page: ProgressPage | None,
) -> RankEpoch:
    """What follows on either end: the ranks agree on the blocks, compare themselves, and form the group."""

    def exchange(own: bytes) -> list[bytes]:
        shares = link.exchange(own, deadline)
        if len(shares) != place.world:
            raise EpFrameCorrupt(f"{len(shares)} ranks gave their share, of {place.world}")
        return shares

    num_blocks = min(_offer(number, blob) for number, blob in enumerate(exchange(msgspec.msgpack.encode(rank.plan.num_blocks))))
    handshake(own_fingerprint(rank, place, num_blocks), deadline)
    comm = _communicator(rank, place, exchange, link.check, page)
    with ExitStack() as undo:
        undo.callback(comm.close)
        epoch = RankEpoch(rank, place, comm, num_blocks)
        undo.pop_all()
    return epoch


def _offer(rank: int, blob: bytes) -> int:
    """The blocks that a rank has room for."""
    try:
        return msgspec.msgpack.decode(blob, type=Annotated[int, msgspec.Meta(ge=0)])
    except (msgspec.DecodeError, msgspec.ValidationError) as fault:
        raise EpFrameCorrupt(f"offer of blocks of rank {rank}: {brief(fault)}") from fault


def own_fingerprint(rank: RankModel, place: EpochPlace, num_blocks: int) -> Fingerprint:
    """What this rank is, read from this process."""
    nccl = torch.cuda.nccl.version() if rank.device.type == "cuda" else ()
    return Fingerprint(
        protocol_version=rank.config.protocol,
        messages_version=MESSAGES_VERSION,
        package=version(DISTRIBUTION),
        python=platform.python_version(),
        torch=str(torch.__version__),
        nccl=".".join(str(part) for part in nccl),
        triton=_triton_version(),
        config_hash=rank.config.digest(),
        model_config_hash=rank.folder.config,
        manifest_hash=rank.folder.manifest,
        layout=rank.layout,
        tuning=rank.tuning,
        world=place.world,
        slots=rank.plan.max_slots,
        blocks=num_blocks,
        block_size=rank.config.block_size,
        device=_device_kind(rank.device),
        dtype=str(rank.dtype),
        rank=rank.parallel.rank,
        host=socket.gethostname(),
    )


def _communicator(
    rank: RankModel, place: EpochPlace, exchange: Exchange, check: Callable[[], None], page: ProgressPage | None
) -> EpochCommunicator:
    if place.world == 1:
        return LoneRank()
    timeout_s = max(rank.config.command_timeout, rank.config.warm_timeout) + BACKSTOP_SECONDS
    exchange(b"")  # from here on every rank is there: what cannot be cut short takes no longer than connecting
    group = form_group(
        place.store,
        epoch=place.epoch,
        rank=rank.parallel.rank,
        world=place.world,
        device=rank.device,
        host=place.host,
        timeout_s=timeout_s,
        check=check,
        page=page,
    )
    with ExitStack() as undo:
        undo.callback(group.close)
        if rank.device.type == "cuda" and rank.config.forward_mode != "reference" and place.one_host:
            peers = rank.resident.peers(rank.parallel.rank, place.world, rank.device, rank.dtype)
            group.join_peers(exchange, peers)
        if rank.device.type == "cpu" and place.one_host and host_memory.available():
            group.join_host(exchange, timeout_s)
        undo.pop_all()
    return group


def _device_kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _triton_version() -> str:
    try:
        return version("triton")
    except ModuleNotFoundError:
        return ""
