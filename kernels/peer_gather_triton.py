"""Shards of all ranks side by side on rank 0, read where they are: each rank writes its own into its memory and tells the others.

Signals, turns and halves are those of `kernels.one_shot_triton`; a program has one part.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import cdiv
from kernels.peer_memory import GATHER_BLOCK, PeerMemory, gather_share
from kernels.peer_tiles_triton import tell, wait


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
        share = gather_share(rows * width, memory.programs)
        _gather_kernel[(cdiv(rows * width, share),)](
            shard,
            out,
            memory.buffers,
            memory.signals,
            memory.turns,
            memory.abort,
            rows,
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


@triton.jit(do_not_specialize=["rows"])
def _gather_kernel(
    shard,
    out,
    buffers,
    signals,
    turns,
    abort,
    rows,
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
    end = tl.minimum(first + share, rows * width)
    turn = tl.load(turns + program) + 1
    place = (turn & 1).to(tl.int64) * CAPACITY + program * REGION
    dtype: tl.constexpr = shard.dtype.element_ty
    own = tl.multiple_of(tl.load(buffers + RANK).to(tl.pointer_type(dtype)), 16)
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(own + place + (at - first), tl.load(shard + at, mask=at < end), mask=at < end)
    tell(signals, program, turn, RANK, WORLD, LINE)
    wait(signals, abort, program, turn, tl.full([], 0, tl.int32), RANK, WORLD, LINE, SPINS, PAUSE, READER)
    if RANK == 0:
        for r in tl.static_range(WORLD):
            theirs = tl.multiple_of(tl.load(buffers + r).to(tl.pointer_type(dtype)), 16)
            for start in range(first, end, BLOCK):
                at = start + tl.arange(0, BLOCK)
                value = tl.load(theirs + place + (at - first), mask=at < end, other=0.0).to(tl.float32)
                row = at // width
                tl.store(out + row.to(tl.int64) * (WORLD * width) + r * width + (at - row * width), value, mask=at < end)
    tl.store(turns + program, turn)
