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
SLOT = 1 << 12


def _memory(
    ctx: RankContext,
    exchange: Callable[[bytes], list[bytes]],
    use: str,
    dtype: torch.dtype,
    programs: int,
    line: int,
    reader: str,
    word_rows: int = 0,
    two_shots: bool = False,
) -> tuple[Any, Any]:
    """A `PeerMemory` of files, and the tensors that must outlive it. Files of one use are made once."""
    from kernels.peer_memory import PROGRAMS, SIGNAL_LINE, PeerMemory, Waiting

    words = 2 * ctx.world * SLOT * 8 // dtype.itemsize
    sizes = {"buffer": (2 * CAPACITY + words, dtype), "signals": (PROGRAMS * SIGNAL_LINE, torch.int32)}
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
        turns=torch.zeros(2 * PROGRAMS, dtype=torch.int32),
        abort=torch.zeros(1, dtype=torch.int32),
        capacity=CAPACITY,
        programs=programs,
        line=line,
        words_at=2 * CAPACITY * dtype.itemsize // 8,
        slot=SLOT,
        word_rows=word_rows,
        two_shots=two_shots,
        waiting=Waiting(spins=16, reader=reader),  # type: ignore[arg-type]
    ), mapped


def choices(rank: int, world: int, call: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[T, 3, width]` of three choices a row, the same on all ranks, and which of them are the rank's `[T, 3]`."""
    value = part(0, call + 200, (3 * shape[0], shape[1]), dtype).view(shape[0], 3, shape[1])
    return value, torch.arange(3 * shape[0]).view(-1, 3) * 5 % 7 % (world + 1) == rank


def _pairs(ctx: RankContext, call: int, shape: tuple[int, int], dtype: torch.dtype) -> Any:
    """The rank's share of `choices` as a kernel gets it: what is not its own is unwritten."""
    from kernels.pairs import Pairs

    value, mine = choices(ctx.rank, ctx.world, call, shape, dtype)
    value = value.masked_fill(~mine[:, :, None], float("nan"))
    experts = torch.where(mine, 1, 0)
    return Pairs(value.view(-1, shape[1]), experts, torch.tensor([-1, 0]))


def sum_rows(
    ctx: RankContext,
    *,
    dtype: str,
    shapes: list[list[int]],
    programs: int,
    line: int,
    reader: str,
    word_rows: int,
    two_shots: bool,
) -> list[dict[str, np.ndarray]]:
    """For each shape, one call after another, in float32: the sum, what it added to, its norm, a sum of choices; the shards."""
    from kernels.peer_gather_triton import gather_rows
    from kernels.peer_sums import reduce_add_norm_rows, reduce_rows

    of = getattr(torch, dtype)
    exchange = exchange_of(ctx)
    memory, _sums = _memory(ctx, exchange, "sums", of, programs, line, reader, word_rows, two_shots)
    found = []
    for call, shape in enumerate(shapes):
        mine = part(ctx.rank, call, tuple(shape), of)
        total = reduce_rows(memory, mine)
        x = part(0, call + 100, tuple(shape), torch.float32).to(of)
        weight = torch.linspace(0.5, 1.5, shape[1]).to(of)
        normed = reduce_add_norm_rows(memory, mine, x, weight, 1e-3)
        chosen = reduce_rows(memory, _pairs(ctx, call, (shape[0], shape[1]), of))
        results = {"total": total, "x": x, "normed": normed, "chosen": chosen}
        found.append({name: result.float().numpy() for name, result in results.items()})
    shards, _shards = _memory(ctx, exchange, "shards", of, programs, line, reader)
    for call, shape in enumerate(shapes):
        found[call]["gathered"] = gather_rows(shards, part(ctx.rank, call, tuple(shape), of)).numpy()
    return found


def wait_alone(ctx: RankContext, *, reader: str, word_rows: int, two_shots: bool) -> bool:
    """Rank 0 sums with peers that never come, until its host says to stop; whether it was waiting until then."""
    from kernels.peer_sums import reduce_rows

    memory, _held = _memory(ctx, exchange_of(ctx), "sums", torch.float32, 4, 32, reader, word_rows, two_shots)
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
