"""What ranks run in the communicator's tests."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import torch

from ep_runtime.engine.comm import GroupCommunicator, form_group
from ep_runtime.engine.host_memory import HALF_BYTES
from tests.support.rank_context import RankContext

LARGE = HALF_BYTES // 4 + 5
"""float32 elements that do not fit shared memory."""


def _group(ctx: RankContext, shared: bool) -> GroupCommunicator:
    group = form_group(
        ctx.store(),
        epoch=ctx.epoch,
        rank=ctx.rank,
        world=ctx.world,
        device=torch.device("cpu"),
        host="127.0.0.1",
        timeout_s=60.0,
        check=lambda: None,
    )
    if shared:
        group.join_host(ctx.store(), ctx.epoch)
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
