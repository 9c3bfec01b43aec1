"""What ranks run in the tests of sums through peer memory: kernels in Triton's interpreter, over files that the ranks map."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.distributed.comm_cases import exchange_of, part
from tests.support.rank_context import RankContext

CAPACITY = 1 << 19


def _memory(
    ctx: RankContext, exchange: Callable[[bytes], list[bytes]], use: str, dtype: torch.dtype, programs: int, line: int, reader: str
) -> tuple[Any, Any]:
    """A `PeerMemory` of files, and the tensors that must outlive it. Files of one use are made once."""
    from kernels.one_shot_triton import PROGRAMS, SIGNAL_LINE, PeerMemory, Waiting

    sizes = {"buffer": (2 * CAPACITY, dtype), "signals": (PROGRAMS * SIGNAL_LINE, torch.int32)}
    for kind, (size, of) in sizes.items():
        (ctx.runtime_dir / f"{use}-{kind}-{ctx.rank}").write_bytes(bytes(size * of.itemsize))
    exchange(b"")
    mapped = [
        [torch.from_file(str(ctx.runtime_dir / f"{use}-{kind}-{rank}"), True, size, dtype=of) for rank in range(ctx.world)]
        for kind, (size, of) in sizes.items()
    ]
    buffers, signals = (torch.tensor([tensor.data_ptr() for tensor in tensors]) for tensors in mapped)
    return PeerMemory(
        rank=ctx.rank,
        world=ctx.world,
        buffers=buffers,
        signals=signals,
        turns=torch.zeros(PROGRAMS, dtype=torch.int32),
        abort=torch.zeros(1, dtype=torch.int32),
        capacity=CAPACITY,
        programs=programs,
        line=line,
        waiting=Waiting(spins=16, reader=reader),  # type: ignore[arg-type]
    ), mapped


def sum_rows(
    ctx: RankContext, *, dtype: str, shapes: list[list[int]], programs: int, line: int, reader: str
) -> list[dict[str, np.ndarray]]:
    """For each shape, as one call after another: the sum, what it added to, and its norm, as float32; on rank 0 the shards."""
    from kernels.one_shot_triton import gather_rows, reduce_add_norm_rows, reduce_rows

    of = getattr(torch, dtype)
    exchange = exchange_of(ctx)
    memory, _sums = _memory(ctx, exchange, "sums", of, programs, line, reader)
    found = []
    for call, shape in enumerate(shapes):
        mine = part(ctx.rank, call, tuple(shape), of)
        total = reduce_rows(memory, mine)
        x = part(0, call + 100, tuple(shape), torch.float32).to(of)
        weight = torch.linspace(0.5, 1.5, shape[1]).to(of)
        normed = reduce_add_norm_rows(memory, mine, x, weight, 1e-3)
        found.append({"total": total.float().numpy(), "x": x.float().numpy(), "normed": normed.float().numpy()})
    shards, _shards = _memory(ctx, exchange, "shards", of, programs, line, reader)
    for call, shape in enumerate(shapes):
        found[call]["gathered"] = gather_rows(shards, part(ctx.rank, call, tuple(shape), of)).numpy()
    return found


def wait_alone(ctx: RankContext, *, reader: str) -> bool:
    """Rank 0 sums with peers that never come, until its host says to stop; whether it was waiting until then."""
    from kernels.one_shot_triton import reduce_rows

    memory, _held = _memory(ctx, exchange_of(ctx), "sums", torch.float32, 4, 32, reader)
    if ctx.rank != 0:
        return True
    done = threading.Event()

    def reduce() -> None:
        reduce_rows(memory, torch.ones(4, 8))
        done.set()

    threading.Thread(target=reduce, daemon=True).start()
    waited = not done.wait(0.3)
    memory.abort.fill_(1)
    return done.wait(30) and waited
