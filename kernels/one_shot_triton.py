"""Sums over ranks through peer memory, in one launch: each rank shows its partial to the others and adds all of them itself.

A launch has at most PROGRAMS programs, whatever its shape, so that all of them run at once. Program p owns every PROGRAMS-th row.
It copies its rows of the partial into the half of its rank's buffer that is in turn, tells every peer, waits until all have told
it, and adds the ranks' rows in rank order in float32: the same bits on all ranks. The sum can be added to the residual and
normalised in the same launch. The read of a signal that ends a wait acquires, so that plain reads of the peers' rows may follow it.

| word | in | written by | meaning |
|---|---|---|---|
| `signals[p * line + r]` | every rank's signal memory | rank r, a peer | rank r's part p of call n is readable, when it holds n |
| `turns[p]` | this rank's memory | this rank | the number of calls that program p has finished |
| `abort[0]` | pinned host memory | this rank's host | not 0: leave without the peers; the output means nothing |

Two halves suffice: a rank writes half n % 2 again in program p's call n + 2, which it enters only after every peer has told it of
p's call n + 1, and a peer tells of n + 1 only after its call n has ended. What program p writes lies where only program p ever
writes, in every call. Addresses come from device tables, so that graphs can outlive an epoch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

PROGRAMS = 256
"""Most programs of a launch: two a multiprocessor, so that none waits for a peer that waits for its own start."""

GATHER_BLOCK = 2048
"""Elements that a program of a gather moves at a time."""

SPINS_A_LOOK = 8192
"""Reads of a peer's signal between looks at the abort word, about a millisecond.

The word lies in host memory, where reads of all programs queue, 0.6 us each: looks that take longer than their interval make the
rank late for its peers, which then look too. With 1024 reads by every warp of 128 programs, that state kept itself up.
"""

SIGNAL_LINE = 32
"""int32 words of a cache line: one program's signals. Those who wait for others then do not slow its peers' writes down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """How a program waits for its peers.

    `spins`: reads between looks at the abort word. `pause_ns`: pause before each read, 0 for none. `reader`: every warp reads, or
    one thread does and tells the others, by a load or by an atomic operation.
    """

    spins: int = SPINS_A_LOOK
    pause_ns: int = 0
    reader: Literal["warps", "thread", "atomic"] = "thread"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerMemory:
    """What the kernels need of a group. Tables are int64 `[world]` on the device: the ranks' buffers and signals, own ones too.

    A buffer holds two halves of `capacity` elements; signals are int32 `[PROGRAMS * SIGNAL_LINE]`, turns int32 `[PROGRAMS]`, all
    zero at the start of an epoch. `abort` is one int32 in pinned host memory. One memory serves sums of one width, or gathers, not
    both, and always by the same number of `programs`, whose signals are `line` words apart, from `world` to SIGNAL_LINE.
    """

    rank: int
    world: int
    buffers: torch.Tensor
    signals: torch.Tensor
    turns: torch.Tensor
    abort: torch.Tensor
    capacity: int
    programs: int = PROGRAMS
    line: int = SIGNAL_LINE
    waiting: Waiting = Waiting()

    def __post_init__(self) -> None:
        if not (self.world <= self.line <= SIGNAL_LINE and 1 <= self.programs <= PROGRAMS):
            raise ValueError(f"{self.programs} programs with signals {self.line} words apart do not fit the memory for signals")

    def fits(self, rows: int, width: int) -> bool:
        """Whether a partial `[rows, width]` can be summed in one launch."""
        return rows * width <= self.capacity

    def fits_gather(self, rows: int, width: int) -> bool:
        """Whether shards `[rows, width]` can be gathered in one launch."""
        return _gather_share(rows * width, self.programs) <= self.capacity // self.programs


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
    """On rank 0 the shards `[T, width]` of all ranks side by side in rank order, `[T, world * width]` float32; elsewhere empty.

    Every rank waits for every other, so that nobody writes what is still read.
    """
    rows, width = shard.shape
    if not memory.fits_gather(rows, width):
        raise ValueError(
            f"{rows} rows of {width} do not fit {memory.programs} parts of {memory.capacity // memory.programs} elements"
        )
    shard = shard.contiguous()
    out = torch.empty(rows if memory.rank == 0 else 0, memory.world * width, dtype=torch.float32, device=shard.device)
    if rows:
        share = _gather_share(rows * width, memory.programs)
        _gather_kernel[(triton.cdiv(rows * width, share),)](
            shard,
            out,
            memory.buffers,
            memory.signals,
            memory.turns,
            memory.abort,
            rows * width,
            width,
            share,
            CAPACITY=memory.capacity,
            REGION=memory.capacity // memory.programs,
            RANK=memory.rank,
            WORLD=memory.world,
            BLOCK=GATHER_BLOCK,
            LINE=memory.line,
            SPINS=memory.waiting.spins,
            PAUSE=memory.waiting.pause_ns,
            READER=memory.waiting.reader,
            num_warps=8,
        )
    return out


def _gather_share(elements: int, programs: int) -> int:
    """Elements of one program: whole blocks, at most so many programs."""
    return triton.cdiv(elements, programs * GATHER_BLOCK) * GATHER_BLOCK


def _launch(memory, partial, x, shared, shared_gate, weight, normed, total, eps, zero_centered) -> None:
    rows, width = partial.shape
    if not memory.fits(rows, width):
        raise ValueError(f"{rows} rows of {width} do not fit {memory.capacity} elements")
    if not partial.is_contiguous() or (x is not None and not x.is_contiguous()):
        raise ValueError("rows must be contiguous")
    if rows == 0:
        return
    block = triton.next_power_of_2(width)
    _one_shot_kernel[(min(rows, memory.programs),)](
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
        rows,
        width,
        0 if shared is None else shared.stride(0),
        0 if shared_gate is None else shared_gate.stride(0),
        eps,
        CAPACITY=memory.capacity,
        RANK=memory.rank,
        WORLD=memory.world,
        PROGRAMS=memory.programs,
        BLOCK=block,
        ADD=x is not None,
        SHARED=shared is not None,
        ZERO_CENTERED=zero_centered,
        LINE=memory.line,
        SPINS=memory.waiting.spins,
        PAUSE=memory.waiting.pause_ns,
        READER=memory.waiting.reader,
        num_warps=min(16, max(4, block // 512)),
    )


@triton.jit
def _look(word, READER: tl.constexpr):
    """The word's value now. Unless every warp reads for itself, it is the same for all, and acquired.

    Triton's atomics run in one thread and give their result to all. Adding nothing is compiled to a load; taking the larger is not.
    """
    if READER == "warps":
        return tl.load(word, volatile=True)
    elif READER == "thread":
        return tl.atomic_add(word, 0, sem="acquire", scope="sys")
    else:
        return tl.atomic_max(word, 0, sem="acquire", scope="sys")


@triton.jit
def _meet(
    signals,
    abort,
    program,
    turn,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    LINE: tl.constexpr,
    SPINS: tl.constexpr,
    PAUSE: tl.constexpr,
    READER: tl.constexpr,
):
    """Tell every peer that this rank's part of `turn` is readable, and wait until all have told it, or the host says to stop.

    The host's word is never the target of an atomic operation, which its link to the device may not have.
    """
    for r in tl.static_range(WORLD):
        if r != RANK:
            theirs = tl.load(signals + r).to(tl.pointer_type(tl.int32)) + program * LINE + RANK
            tl.atomic_xchg(theirs, turn, sem="release", scope="sys")
    told = tl.load(signals + RANK).to(tl.pointer_type(tl.int32)) + program * LINE
    stop = 0
    for r in tl.static_range(WORLD):
        if r != RANK:
            seen = _look(told + r, READER)
            spins = 0
            while (seen < turn) & (stop == 0):
                if PAUSE > 0:
                    tl.inline_asm_elementwise(
                        "nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [PAUSE], dtype=tl.int32, is_pure=False, pack=1
                    )
                seen = _look(told + r, READER)
                spins += 1
                if spins % SPINS == 0:
                    stop = _look(abort, "warps" if READER == "warps" else "thread")
            if READER == "warps":
                # An acquiring load whose value nobody uses would be left out.
                tl.atomic_max(told + r, 0, sem="acquire", scope="sys")


@triton.jit
def _gather_kernel(
    shard,
    out,
    buffers,
    signals,
    turns,
    abort,
    elements,
    width,
    share,
    CAPACITY: tl.constexpr,
    REGION: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    LINE: tl.constexpr,
    SPINS: tl.constexpr,
    PAUSE: tl.constexpr,
    READER: tl.constexpr,
):
    program = tl.program_id(0)
    first = program * share
    end = tl.minimum(first + share, elements)
    turn = tl.load(turns + program) + 1
    place = (turn % 2).to(tl.int64) * CAPACITY + program * REGION
    dtype: tl.constexpr = shard.dtype.element_ty
    own = tl.multiple_of(tl.load(buffers + RANK).to(tl.pointer_type(dtype)), 16)
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(own + place + (at - first), tl.load(shard + at, mask=at < end), mask=at < end)
    tl.debug_barrier()
    _meet(signals, abort, program, turn, RANK, WORLD, LINE, SPINS, PAUSE, READER)
    tl.debug_barrier()
    if RANK == 0:
        for r in tl.static_range(WORLD):
            theirs = tl.multiple_of(tl.load(buffers + r).to(tl.pointer_type(dtype)), 16)
            for start in range(first, end, BLOCK):
                at = start + tl.arange(0, BLOCK)
                value = tl.load(theirs + place + (at - first), mask=at < end, other=0.0).to(tl.float32)
                row = at // width
                tl.store(out + row.to(tl.int64) * (WORLD * width) + r * width + (at - row * width), value, mask=at < end)
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
    rows,
    width,
    shared_stride,
    gate_stride,
    eps,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    SHARED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    LINE: tl.constexpr,
    SPINS: tl.constexpr,
    PAUSE: tl.constexpr,
    READER: tl.constexpr,
):
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    here = at < width
    turn = tl.load(turns + program) + 1
    half = (turn % 2).to(tl.int64) * CAPACITY
    dtype: tl.constexpr = partial.dtype.element_ty
    own = tl.multiple_of(tl.load(buffers + RANK).to(tl.pointer_type(dtype)), 16) + half
    for row in range(program, rows, PROGRAMS):
        to = tl.cast(row, tl.int64) * width + at
        tl.store(own + to, tl.load(partial + to, mask=here), mask=here)
    tl.debug_barrier()
    _meet(signals, abort, program, turn, RANK, WORLD, LINE, SPINS, PAUSE, READER)
    tl.debug_barrier()
    for row in range(program, rows, PROGRAMS):
        to = tl.cast(row, tl.int64) * width + at
        value = tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(WORLD):
            theirs = tl.multiple_of(tl.load(buffers + r).to(tl.pointer_type(dtype)), 16) + half
            value += tl.load(theirs + to, mask=here, other=0.0).to(tl.float32)
        # A sum is a value of the model's dtype wherever it is made: the reference rounds it there, too.
        value = value.to(dtype).to(tl.float32)
        if ADD:
            if SHARED:
                opened = tl.sigmoid(tl.load(shared_gate + row * gate_stride).to(tl.float32))
                more = tl.load(shared + tl.cast(row, tl.int64) * shared_stride + at, mask=here, other=0.0)
                value += opened * more.to(tl.float32)
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
    tl.store(turns + program, turn)
