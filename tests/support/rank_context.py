"""What a rank function gets as its first argument."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

HOST = "127.0.0.1"


@dataclass(kw_only=True, slots=True)
class RankContext:
    """One rank of one job. `epoch` is the job's number, never used twice in a pool.

    `runtime_dir` is shared by the job's ranks, with a short path (Unix sockets), and removed after the job. `store_port` is a
    loopback port on which rank 0 already holds the listening socket `store_fd` (None elsewhere); `store()` makes a TCPStore of it.
    """

    rank: int
    world: int
    epoch: int
    store_port: int
    store_fd: int | None
    runtime_dir: Path
    kwargs: dict[str, Any]
    store_host: str = HOST
    _store: dist.TCPStore | None = field(default=None, repr=False)

    def store(self, timeout: float = 60.0) -> dist.TCPStore:
        """The job's key-value store, made on the first call: hosted by rank 0, joined by the others.

        It lives until every rank has answered.
        """
        if self._store is None:
            fd, self.store_fd = self.store_fd, None
            self._store = dist.TCPStore(
                HOST,
                self.store_port,
                is_master=self.rank == 0,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                master_listen_fd=fd,
            )
        return self._store

    def init_gloo(self, timeout: float = 60.0) -> None:
        """Make torch.distributed's default group of this job's ranks, over Gloo. It is destroyed when the function ends."""
        store = dist.PrefixStore(f"gloo/{self.epoch}", self.store(timeout))
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world, timeout=timedelta(seconds=timeout))

    def leave(self) -> None:
        """Drop the default group, if there is one. Local: no rank waits for another."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def close(self) -> None:
        """Drop the store, once no rank needs it, and the listening socket where no store was made of it."""
        self._store = None
        if self.store_fd is not None:
            os.close(self.store_fd)
            self.store_fd = None
