"""Logits that stay on their ranks until somebody wants them, and the tokens that the head has chosen, on their way to all ranks.

A rank shows its shard of a step's logits: it lies in memory that the head reads, and stays there until the step's tokens have come.
The head has found the best of every row (`kernels.best_triton`); it reads whole rows only of those that need more than that, before
it sends the tokens. So the tokens of a step say that nobody reads its shards any more.

| place | in | written by | meaning |
|---|---|---|---|
| `words[i]` | every peer's buffer | the head | the i-th token of turn n, and n above it |
| `signals[place + r]` | the head's signal memory | rank r, a peer, released | n: r has read the tokens of turn n |
| `turns[PROGRAMS]` | this rank's memory | this rank | the number of calls |

The head writes words again when every peer has told that it has read the last ones. Waits look at the abort word, as all do.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl

from kernels.best_triton import BEST_ROWS, BEST_WORDS, await_told, tell
from kernels.launch import Launch, bind, cdiv
from kernels.one_shot_words_triton import look
from kernels.peer_memory import PROGRAMS, SIGNAL_LINE, PeerMemory

SENT_TOKENS = 1024
"""Most tokens of a call."""

BLOCK = 2048


def shard_words(world: int) -> int:
    """Words of 8 bytes behind the shown shards: those of `kernels.best_triton`, then the tokens."""
    return world * BEST_ROWS * BEST_WORDS + SENT_TOKENS


def shown_shard(memory: PeerMemory, rows: int, width: int) -> torch.Tensor | None:
    """This rank's place for a shard `[rows, width]` that the head may read; None where it does not fit: the same on all ranks."""
    if memory.shown is None or rows > BEST_ROWS or rows * width > len(memory.shown):
        return None
    return memory.shown[: rows * width].view(rows, width)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftLogits:
    """A step's logits where they were made. `best [T, 2]` int64 has the token of each row's largest, and its status.

    `shard [T, width]` is this rank's. All of it means something on the head alone, and until the next step.
    """

    best: torch.Tensor
    shard: torch.Tensor
    vocab_size: int
    memory: PeerMemory | None

    def __len__(self) -> int:
        return len(self.best)

    @property
    def device(self) -> torch.device:
        """Of the tensors."""
        return self.best.device

    def upto(self, count: int) -> LeftLogits:
        """The first `count` rows."""
        return replace(self, best=self.best[:count], shard=self.shard[:count])

    def pick(self, rows: torch.Tensor) -> torch.Tensor:
        """Whole rows, by their numbers `[w]` int64: `[w, vocab]` float32, for the caller to overwrite."""
        return pick_rows(self.memory, self.shard, rows, self.vocab_size)


def pick_rows(memory: PeerMemory | None, shard: torch.Tensor, rows: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """On the head: rows of all ranks' shards side by side, without the padding behind `vocab_size`, float32."""
    width = shard.shape[1]
    out = torch.empty(len(rows), vocab_size, dtype=torch.float32, device=shard.device)
    if not len(rows):
        return out
    world = 1 if memory is None else memory.world
    _pick_kernel[(len(rows), cdiv(width, BLOCK), world)](
        shard,
        rows,
        out,
        None if memory is None else memory.buffers,
        shard.stride(0),
        width,
        vocab_size,
        WORLD=world,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


def send_tokens(memory: PeerMemory, tokens: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor) -> None:
    """On every rank `last_tokens[slots[i]]` becomes the head's `tokens[i]`, all int64. On others `tokens` only has their number."""
    count = len(tokens)
    if count > SENT_TOKENS:
        raise ValueError(f"{count} tokens; at most {SENT_TOKENS} go at once")
    if count:
        _send(memory.rank, memory.world, memory.words_at, memory.waiting.spins)(
            (1, 1, 1),
            tokens,
            slots,
            last_tokens,
            memory.buffers,
            memory.signals,
            memory.turns[PROGRAMS:],
            memory.abort,
            count,
            tokens.stride(0),
        )


@cache
def _send(rank: int, world: int, words_at: int, spins: int) -> Launch:
    return bind(
        _send_kernel,
        RANK=rank,
        WORLD=world,
        WORDS_AT=words_at + world * BEST_ROWS * BEST_WORDS,
        TOLD_AT=(PROGRAMS - 1) * SIGNAL_LINE,
        SPINS=spins,
        BLOCK=SENT_TOKENS,
        num_warps=4,
    )


@triton.jit
def _pick_kernel(shard, rows, out, buffers, stride, width, vocab, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    rank = tl.program_id(2)
    row = tl.load(rows + number)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = rank * width + at
    here = (at < width) & (token < vocab)
    own = tl.where(rank == 0, width, 0)
    value = tl.load(shard + row * stride + at, mask=here & (at < own), other=0.0)
    if WORLD > 1:
        theirs = tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(shard.dtype.element_ty)), 16)
        shown = tl.load(theirs + row * width + at, mask=here & (at >= own), other=0.0)
        value = tl.where(at < own, value, shown)
    tl.store(out + number * vocab + token, value.to(tl.float32), mask=here)


# Slots may lie anywhere in a step's inputs: one kernel is compiled for all steps.
@triton.jit(do_not_specialize=["count", "stride"], do_not_specialize_on_alignment=["tokens", "slots"])
def _send_kernel(
    tokens,
    slots,
    last_tokens,
    buffers,
    signals,
    turns,
    abort,
    count,
    stride,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    WORDS_AT: tl.constexpr,
    TOLD_AT: tl.constexpr,
    SPINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    here = at < count
    slot = tl.load(slots + at, mask=here, other=0)
    turn = tl.load(turns) + 1
    number = turn.to(tl.uint32, bitcast=True)
    stop = tl.full([], 0, tl.int32)
    if RANK == 0:
        token = tl.load(tokens + at * stride, mask=here, other=0)
        word = token.to(tl.uint64) | (number.to(tl.uint64) << 32)
        for r in tl.static_range(1, WORLD):
            stop = await_told(signals, 0, TOLD_AT + r, turn - 1, abort, stop, SPINS)
        for r in tl.static_range(1, WORLD):
            theirs = tl.multiple_of(tl.load(buffers + r).to(tl.pointer_type(tl.uint64)) + WORDS_AT, 2)
            tl.store(theirs + at, word, mask=here)
    else:
        mine = tl.multiple_of(tl.load(buffers + RANK).to(tl.pointer_type(tl.uint64)) + WORDS_AT, 2)
        word = tl.zeros([BLOCK], tl.uint64)
        missing = 1
        spins = 0
        while (missing != 0) & (stop == 0):
            word = tl.load(mine + at, mask=here, other=0, volatile=True)
            late = ((word >> 32).to(tl.uint32) != number).to(tl.int32)
            missing = tl.max(tl.where(here, late, 0), 0)
            spins += 1
            if spins % SPINS == 0:
                stop = look(abort, "thread")
        # Without the head a word may be anything, and the next step looks its token up.
        token = tl.where(missing == 0, word & 0xFFFFFFFF, 0).to(tl.int64)
        tl.debug_barrier()
        tell(signals, 0, TOLD_AT + RANK, turn)
    tl.store(last_tokens + slot, token, mask=here)
    tl.store(turns, turn)
