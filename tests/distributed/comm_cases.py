"""What ranks run in the communicator's tests."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import torch

from ep_runtime.engine.comm import GroupCommunicator, form_group
from ep_runtime.engine.host_memory import HALF_BYTES
from protocol.errors import EpLinkLost
from tests.support.rank_context import RankContext

LARGE = HALF_BYTES // 4 + 5
"""float32 elements that do not fit shared memory."""


def exchange_of(ctx: RankContext) -> Callable[[bytes], list[bytes]]:
    """What the links do for an epoch's ranks, through the job's store."""
    calls = itertools.count()

    def exchange(own: bytes) -> list[bytes]:
        call = next(calls)
        ctx.store().set(f"exchange-{call}-{ctx.rank}", own)
        return [ctx.store().get(f"exchange-{call}-{rank}") for rank in range(ctx.world)]

    return exchange


def _group(ctx: RankContext, shared: bool, check: Callable[[], None] = lambda: None) -> GroupCommunicator:
    group = form_group(
        f"{ctx.store_host}:{ctx.store().port}",
        epoch=ctx.epoch,
        rank=ctx.rank,
        world=ctx.world,
        device=torch.device("cpu"),
        host="127.0.0.1",
        timeout_s=60.0,
        check=check,
    )
    if shared:
        group.join_host(exchange_of(ctx), 60.0)
    return group


def part(rank: int, call: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings to a call: values whose float32 sum depends on the order of addition."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return (torch.randn(shape, generator=generator) * 10.0 ** (rank * 3)).to(dtype)


def sums(ctx: RankContext, *, shared: bool, shapes: list[list[int]], dtype: str) -> list[np.ndarray]:
    """Each shape reduced once; the sums as float32, and the bits of the last as int."""
    with closing(_group(ctx, shared)) as group:
        found = []
        for call, shape in enumerate(shapes):
            mine = part(ctx.rank, call, tuple(shape), getattr(torch, dtype))
            before = mine.clone()
            found.append(group.reduce(mine).float().numpy().copy())
            assert torch.equal(mine, before), "a reduction must leave its input alone"
        assert group.launched == len(shapes)
        return found


def shows(ctx: RankContext, *, shared: bool, rounds: int) -> dict[str, Any]:
    """Gathers, broadcasts and sums in turn, of changing sizes: what each rank saw."""
    with closing(_group(ctx, shared)) as group:
        gathered, told = [], []
        for call in range(rounds):
            shard = part(ctx.rank, call, (3, 1 + call % 5), torch.float32)
            parts = group.gather_to_head(shard)
            assert (parts is None) == (ctx.rank != 0)
            gathered.append(None if parts is None else [piece.numpy().copy() for piece in parts])
            tokens = torch.arange(call % 7, dtype=torch.int64) + (100 * call if ctx.rank == 0 else 0)
            group.broadcast(tokens)
            told.append(tokens.numpy())
            group.reduce(part(ctx.rank, call, (2, 8), torch.bfloat16))
        return {"gathered": gathered, "told": told}


class Closed(EpLinkLost):
    """What `check` raises in these tests."""


def leave_pending(ctx: RankContext, *, shared: bool, elements: int, peer: str) -> dict[str, Any] | None:
    """Rank 0 waits for a collective that rank 1 does not come to, is told to leave, and leaves: seconds, and what goes on after.

    Rank 1 is then killed, or leaves too, by `peer`.
    """
    asked: list[float] = []

    def check() -> None:
        asked.append(time.monotonic())
        if ctx.rank == 0 and len(asked) == 5:
            raise Closed("the epoch is over")

    before = threading.active_count()
    group = _group(ctx, shared, check)
    if ctx.rank == 1:
        ctx.store().get("left")
        if peer == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        group.close()
        return None
    try:
        group.reduce(torch.ones(elements))
    except Closed:
        group.close()
    seconds = time.monotonic() - asked[-1]
    parked = threading.active_count() - before
    ctx.store().set("left", b"1")
    deadline = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    slices = [later - sooner for sooner, later in itertools.pairwise(asked)]
    return {"seconds": seconds, "parked": parked, "after": threading.active_count() - before, "slices": sorted(slices)}
