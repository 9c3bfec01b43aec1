"""Sums over ranks through peer memory, in one launch: each rank shows its partial to the others and adds all of them itself.

Every program owns one row. It copies its row of the partial into the half of its rank's buffer that is in turn, tells every peer,
waits until all have told it, and adds the ranks' rows in rank order in float32: the same bits on all ranks. The sum can be added to
the residual and normalised in the same launch.

| word | in | written by | meaning |
|---|---|---|---|
| `signals[p * world + r]` | every rank's signal memory | rank r | rank r's row p of call n is readable, when it holds n |
| `turns[p]` | this rank's memory | this rank | the number of calls that program p has finished |
| `abort[0]` | pinned host memory | this rank's host | not 0: leave without the peers; the output means nothing |

Two halves suffice: a rank writes half n % 2 again in its row's call n + 2, which it enters only after every peer has told it of
call n + 1, and a peer tells of n + 1 only after its call n has ended. All calls of an epoch have one width: a row keeps its place.
Addresses come from device tables, so that graphs outlive an epoch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

GATHER_PARTS = 16
"""Programs that share a row of a gather, so that a single row is not one program's work."""

SPINS_A_LOOK = 1024
"""Reads of a peer's signal between looks at the abort word, which lies in host memory and is slow to read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerMemory:
    """What the kernel needs of a group. Tables are int64 `[world]` on the device: the ranks' buffers and signals, own ones too.

    A buffer holds two halves of `capacity` elements; signals are int32 `[max_rows * world]`, turns int32 `[max_rows]`, all zero at
    the start of an epoch. `abort` is one int32 in pinned host memory.
    """

    rank: int
    world: int
    buffers: torch.Tensor
    signals: torch.Tensor
    turns: torch.Tensor
    abort: torch.Tensor
    capacity: int
    max_rows: int

    def fits(self, rows: int, width: int) -> bool:
        """Whether a partial `[rows, width]` can be summed in one launch."""
        return rows <= self.max_rows and rows * width <= self.capacity

    def fits_gather(self, rows: int, width: int) -> bool:
        """Whether shards `[rows, width]` can be gathered in one launch."""
        return rows * GATHER_PARTS <= self.max_rows and rows * _padded(width) <= self.capacity


def reduce_rows(memory: PeerMemory, partial: torch.Tensor) -> torch.Tensor:
    """Sum over ranks of `partial [T, width]` (bfloat16, float16 or float32, contiguous), in its dtype."""
    out = torch.empty_like(partial)
    _launch(memory, partial, None, None, None, None, None, out, 0.0, False)
    return out


def reduce_add_norm_rows(
    memory: PeerMemory,
    partial: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x += sum over ranks of partial` in place, rounded to x's dtype, then RMSNorm of x: all `[T, width]`, contiguous.

    With a shared expert's output `shared [T, width]` and gate logit `[T, 1]`, x also gains `sigmoid(shared_gate) * shared`.
    """
    out = torch.empty_like(x)
    _launch(memory, partial, x, shared, shared_gate, weight, out, None, eps, zero_centered)
    return out


def gather_rows(memory: PeerMemory, shard: torch.Tensor) -> torch.Tensor:
    """On rank 0 the shards `[T, width]` of all ranks side by side in rank order, `[T, world * width]` float32; elsewhere undefined.

    Every rank waits for every other, so that nobody writes what is still read.
    """
    rows, width = shard.shape
    if not memory.fits_gather(rows, width):
        raise ValueError(f"{rows} rows of {width} do not fit {memory.max_rows} programs and {memory.capacity} elements")
    out = torch.empty(rows if memory.rank == 0 else 0, memory.world * width, dtype=torch.float32, device=shard.device)
    if rows:
        part = _padded(width) // GATHER_PARTS
        _gather_kernel[(rows, GATHER_PARTS)](
            shard,
            out,
            memory.buffers,
            memory.signals,
            memory.turns,
            memory.abort,
            width,
            shard.stride(0),
            part,
            CAPACITY=memory.capacity,
            RANK=memory.rank,
            WORLD=memory.world,
            PARTS=GATHER_PARTS,
            BLOCK=min(2048, triton.next_power_of_2(part)),
            SPINS=SPINS_A_LOOK,
            num_warps=8,
        )
    return out


def _padded(width: int) -> int:
    return triton.cdiv(width, GATHER_PARTS * 16) * GATHER_PARTS * 16


def _launch(memory, partial, x, shared, shared_gate, weight, normed, total, eps, zero_centered) -> None:
    rows, width = partial.shape
    if not memory.fits(rows, width):
        raise ValueError(f"{rows} rows of {width} do not fit {memory.max_rows} rows and {memory.capacity} elements")
    if not partial.is_contiguous() or (x is not None and not x.is_contiguous()):
        raise ValueError("rows must be contiguous")
    if rows == 0:
        return
    block = triton.next_power_of_2(width)
    _one_shot_kernel[(rows,)](
        partial,
        x,
        shared,
        shared_gate,
        weight,
        normed,
        total,
        memory.buffers,
        memory.signals,
        memory.turns,
        memory.abort,
        width,
        0 if shared is None else shared.stride(0),
        0 if shared_gate is None else shared_gate.stride(0),
        eps,
        CAPACITY=memory.capacity,
        RANK=memory.rank,
        WORLD=memory.world,
        BLOCK=block,
        ADD=x is not None,
        SHARED=shared is not None,
        ZERO_CENTERED=zero_centered,
        SPINS=SPINS_A_LOOK,
        num_warps=min(16, max(4, block // 512)),
    )


@triton.jit
def _meet(signals, abort, program, turn, RANK: tl.constexpr, WORLD: tl.constexpr, SPINS: tl.constexpr):
    """Tell every rank that this one's part of `turn` is readable, and wait until all have told it, or the host says to stop."""
    for r in tl.static_range(WORLD):
        theirs = tl.load(signals + r).to(tl.pointer_type(tl.int32)) + program * WORLD + RANK
        tl.atomic_xchg(theirs, turn, sem="release", scope="sys")
    told = tl.load(signals + RANK).to(tl.pointer_type(tl.int32)) + program * WORLD
    stop = 0
    for r in tl.static_range(WORLD):
        seen = tl.atomic_add(told + r, 0, sem="acquire", scope="sys")
        spins = 0
        while (seen < turn) & (stop == 0):
            seen = tl.atomic_add(told + r, 0, sem="acquire", scope="sys")
            spins += 1
            if spins % SPINS == 0:
                stop = tl.load(abort, volatile=True)


@triton.jit
def _gather_kernel(
    shard,
    out,
    buffers,
    signals,
    turns,
    abort,
    width,
    shard_stride,
    part,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPINS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * part
    program = tl.program_id(0) * PARTS + tl.program_id(1)
    turn = tl.load(turns + program) + 1
    place = (turn % 2).to(tl.int64) * CAPACITY + row * PARTS * part
    dtype: tl.constexpr = shard.dtype.element_ty
    own = tl.load(buffers + RANK).to(tl.pointer_type(dtype))
    end = tl.minimum(first + part, width)
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(own + place + at, tl.load(shard + row * shard_stride + at, mask=at < end), mask=at < end)
    tl.debug_barrier()
    _meet(signals, abort, program, turn, RANK, WORLD, SPINS)
    tl.debug_barrier()
    if RANK == 0:
        for r in tl.static_range(WORLD):
            theirs = tl.load(buffers + r).to(tl.pointer_type(dtype))
            for start in range(first, end, BLOCK):
                at = start + tl.arange(0, BLOCK)
                value = tl.load(theirs + place + at, mask=at < end, other=0.0, volatile=True).to(tl.float32)
                tl.store(out + row * (WORLD * width) + r * width + at, value, mask=at < end)
    tl.store(turns + program, turn)


@triton.jit
def _one_shot_kernel(
    partial,
    x,
    shared,
    shared_gate,
    weight,
    normed,
    total,
    buffers,
    signals,
    turns,
    abort,
    width,
    shared_stride,
    gate_stride,
    eps,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    SHARED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    SPINS: tl.constexpr,
):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    here = at < width
    turn = tl.load(turns + row) + 1
    place = (turn % 2).to(tl.int64) * CAPACITY + row.to(tl.int64) * width
    dtype: tl.constexpr = partial.dtype.element_ty
    own = tl.load(buffers + RANK).to(tl.pointer_type(dtype))
    tl.store(own + place + at, tl.load(partial + row.to(tl.int64) * width + at, mask=here), mask=here)
    tl.debug_barrier()
    _meet(signals, abort, row, turn, RANK, WORLD, SPINS)
    tl.debug_barrier()
    value = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(WORLD):
        theirs = tl.load(buffers + r).to(tl.pointer_type(dtype))
        value += tl.load(theirs + place + at, mask=here, other=0.0, volatile=True).to(tl.float32)
    # A partial sum is a value of the model's dtype wherever it is summed; the reference rounds it there, too.
    value = value.to(dtype).to(tl.float32)
    to = row.to(tl.int64) * width + at
    if ADD:
        if SHARED:
            opened = tl.sigmoid(tl.load(shared_gate + row * gate_stride).to(tl.float32))
            value += opened * tl.load(shared + row.to(tl.int64) * shared_stride + at, mask=here, other=0.0).to(tl.float32)
        value += tl.load(x + to, mask=here, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + to, rounded, mask=here)
        value = rounded.to(tl.float32)
        factor = tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            factor += 1.0
        scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        tl.store(normed + to, (value * scale * factor).to(normed.dtype.element_ty), mask=here)
    else:
        tl.store(total + to, value.to(dtype), mask=here)
    tl.store(turns + row, turn)
