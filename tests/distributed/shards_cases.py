"""What ranks run in the tests of logits that stay on their ranks: kernels in the interpreter, over files that the ranks map."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import torch

from tests.distributed.comm_cases import exchange_of
from tests.distributed.one_shot_cases import CAPACITY, _memory
from tests.support.rank_context import RankContext

SLOTS = 40


def whole_logits(call: int, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits `[rows, vocab]` with few different values, so that the best has equals; some rows are unusable."""
    draw = torch.Generator().manual_seed(call)
    logits = torch.randint(-3, 4, (rows, vocab), generator=draw).to(dtype)
    for row, odd in enumerate((None, float("nan"), float("inf"), -float("inf"), None)[:rows]):
        if odd == -float("inf"):
            logits[row] = odd
        elif odd is not None:
            logits[row, (7 * row + call) % vocab] = odd
    return logits


def shard_of(logits: torch.Tensor, rank: int, world: int) -> tuple[torch.Tensor, range]:
    """A rank's shard, padded with zeros, and the tokens in it: the last shards may be short or empty."""
    vocab = logits.shape[1]
    width = -(-vocab // world)
    held = range(min(rank * width, vocab), min((rank + 1) * width, vocab))
    shard = logits.new_zeros(len(logits), width)
    shard[:, : len(held)] = logits[:, held.start : held.stop]
    return shard, held


def step_of_tokens(ctx: RankContext, *, dtype: str, steps: list[list[int]]) -> list[dict[str, np.ndarray]]:
    """Steps of `[rows, vocab]`, one after another: on the head the best of each row and some whole rows; last tokens everywhere."""
    from kernels.best_triton import best_rows
    from kernels.shards_triton import LeftLogits, send_tokens, shown_shard

    of = getattr(torch, dtype)
    memory, mapped = _memory(ctx, exchange_of(ctx), "shards", of, 4, 32, "thread")
    memory = replace(memory, shown=mapped[0][ctx.rank][: 2 * CAPACITY])
    last = torch.full((SLOTS,), -1)
    found = []
    for call, (rows, vocab) in enumerate(steps):
        shard, held = shard_of(whole_logits(call, rows, vocab, of), ctx.rank, ctx.world)
        place = shown_shard(memory, *shard.shape)
        assert place is not None
        shard = place.copy_(shard)
        best = best_rows(shard, len(held), held.start, memory)
        left = LeftLogits(best=best, shard=shard, vocab_size=vocab, memory=memory)
        some = torch.arange(rows).flip(0)[: (rows + 1) // 2]
        picked = left.pick(some) if ctx.rank == 0 else torch.empty(0)
        tokens = best[:, 0] if ctx.rank == 0 else torch.empty(rows, dtype=torch.int64)
        send_tokens(memory, tokens, torch.arange(rows) * 7 % SLOTS, last)
        place.fill_(-9)  # nobody reads it any more
        found.append({"best": best.numpy(), "picked": picked.numpy(), "last": last.clone().numpy()})
    return found


def wait_alone(ctx: RankContext, *, waits: str) -> bool:
    """A rank waits for others that never come, until its host says to stop; whether it was waiting until then."""
    from kernels.best_triton import best_rows
    from kernels.shards_triton import send_tokens

    memory, _held = _memory(ctx, exchange_of(ctx), "shards", torch.float32, 4, 32, "thread")
    head, kind = {"best": (True, "best"), "told": (False, "best"), "tokens": (False, "tokens"), "read": (True, "tokens")}[waits]
    if (ctx.rank == 0) != head:
        return True
    done = threading.Event()
    last = torch.full((4,), 5)

    def run() -> None:
        for _ in range(1 if waits in ("best", "tokens") else 2):
            if kind == "best":
                best_rows(torch.ones(2, 8), 8, 8 * ctx.rank, memory)
            else:
                send_tokens(memory, torch.full((2,), 3), torch.arange(2), last)
        done.set()

    threading.Thread(target=run, daemon=True).start()
    waited = not done.wait(0.5)
    memory.abort.fill_(1)
    ended = done.wait(30)
    return ended and waited and (head or kind == "best" or last.tolist() == [0, 0, 5, 5])
