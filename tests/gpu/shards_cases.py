"""What two ranks run in the tests of logits that stay on their GPUs: against logits that the head has made whole."""

from __future__ import annotations

from contextlib import closing

import torch

from ep_runtime.engine.resident import Resident
from tests.distributed.comm_cases import exchange_of
from tests.distributed.shards_cases import shard_of
from tests.gpu.recovery_cases import group_of
from tests.support.rank_context import RankContext

SLOTS = 300


def whole_logits(call: int, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits `[rows, vocab]` in sixteenths, so that the best often has equals; some rows are unusable."""
    draw = torch.Generator(device="cuda").manual_seed(call)
    logits = (torch.randn(rows, vocab, device="cuda", generator=draw) * 16).round().div(16).to(dtype)
    if rows > 4:
        logits[1, vocab // 3], logits[2], logits[3, vocab - 1] = torch.nan, -torch.inf, torch.inf
    return logits


def steps_on_gpus(ctx: RankContext, *, dtype: str, steps: list[list[int]], pdl: bool) -> list[str]:
    """Steps of `[rows, vocab]`, twice, one after another without a wait of the host: what was wrong."""
    from kernels.best_triton import best_rows
    from kernels.shards_triton import LeftLogits, shown_shard

    device, of = torch.device("cuda", ctx.rank), getattr(torch, dtype)
    exchange = exchange_of(ctx)
    found = []
    with closing(group_of(ctx, 0)) as group:
        group.join_peers(exchange, Resident().peers(ctx.rank, ctx.world, device, of))
        memory = group.shards
        assert memory is not None
        last = torch.full((SLOTS,), -1, device=device)
        for call, (rows, vocab) in enumerate(steps * 2):
            logits = whole_logits(call, rows, vocab, of)
            shard, held = shard_of(logits, ctx.rank, ctx.world)
            place = shown_shard(memory, *shard.shape)
            assert place is not None
            shard = place.copy_(shard)
            best = best_rows(shard, len(held), held.start, memory, pdl=pdl)
            left = LeftLogits(best=best, shard=shard, vocab_size=vocab, memory=memory)
            some = torch.arange(rows - 1, -1, -3, device=device)
            picked = left.pick(some) if ctx.rank == 0 else logits[some].float()
            tokens = best[:, 0] if ctx.rank == 0 else torch.empty(rows, dtype=torch.int64, device=device)
            group.feed(tokens, torch.arange(rows, device=device), last)
            place.fill_(-9)
            found.append((best, picked, last.clone(), logits))
        torch.cuda.synchronize()
        exchange(b"")  # nobody leaves while another still reads
    wrong = []
    for call, (best, picked, last, logits) in enumerate(found):
        rows = len(logits)
        top = logits.float().amax(1)
        status = torch.where(top.isnan() | (top == torch.inf), 2, torch.where(top == -torch.inf, 1, 0))
        tokens = (logits == logits.amax(1, keepdim=True)).int().argmax(1).where(status == 0, 0)
        if not torch.equal(last[:rows], tokens):
            wrong.append(f"tokens of step {call}")
        if ctx.rank == 0 and not torch.equal(best, torch.stack((tokens, status), 1)):
            wrong.append(f"best of step {call}")
        if not torch.equal(picked.nan_to_num(7.0), logits[torch.arange(rows - 1, -1, -3, device=device)].float().nan_to_num(7.0)):
            wrong.append(f"rows of step {call}")
    return wrong
