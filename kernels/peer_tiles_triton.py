"""What the kernels share that move tiles of rows between ranks: signals, waits for them, and what is done with a tile."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import triton
import triton.language as tl

from kernels.one_shot_words_triton import look
from kernels.pairs_triton import held_choices_of_rows, sum_choices


@triton.jit
def tell(signals, program, told, RANK: tl.constexpr, WORLD: tl.constexpr, LINE: tl.constexpr):
    """Tell every peer what is readable of this rank's part: all that the program has written before."""
    tl.debug_barrier()
    for r in tl.static_range(WORLD):
        if r != RANK:
            theirs = tl.load(signals + r).to(tl.pointer_type(tl.int32)) + program * LINE + RANK
            tl.atomic_xchg(theirs, told, sem="release", scope="sys")


@triton.jit
def tell_one(signals, peer, program, told, RANK: tl.constexpr, LINE: tl.constexpr):
    """Tell one peer what is readable of this rank's part."""
    tl.debug_barrier()
    theirs = tl.load(signals + peer).to(tl.pointer_type(tl.int32)) + program * LINE + RANK
    tl.atomic_xchg(theirs, told, sem="release", scope="sys")


@triton.jit
def _heard(word, abort, told, stop, SPINS: tl.constexpr, PAUSE: tl.constexpr, READER: tl.constexpr):
    """Read a signal until it says as much, or the host says to stop; whether it has."""
    seen = look(word, READER)
    spins = 0
    while (seen - told < 0) & (stop == 0):
        if PAUSE > 0:
            tl.inline_asm_elementwise("nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [PAUSE], dtype=tl.int32, is_pure=False, pack=1)
        seen = look(word, READER)
        spins += 1
        if spins % SPINS == 0:
            stop = look(abort, "warps" if READER == "warps" else "thread")
    if READER == "warps":
        # An acquiring load whose value nobody uses would be left out.
        tl.atomic_max(word, 0, sem="acquire", scope="sys")
    return stop


@triton.jit
def wait(
    signals,
    abort,
    program,
    told,
    stop,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    LINE: tl.constexpr,
    SPINS: tl.constexpr,
    PAUSE: tl.constexpr,
    READER: tl.constexpr,
):
    """Wait until every peer has told as much, or the host says to stop; whether it has. With `stop` it has said so before.

    The host's word is never the target of an atomic operation, which its link to the device may not have.
    """
    mine = tl.load(signals + RANK).to(tl.pointer_type(tl.int32)) + program * LINE
    for r in tl.static_range(WORLD):
        if r != RANK:
            stop = _heard(mine + r, abort, told, stop, SPINS, PAUSE, READER)
    tl.debug_barrier()
    return stop


@triton.jit
def wait_one(
    signals,
    abort,
    peer,
    program,
    told,
    stop,
    RANK: tl.constexpr,
    LINE: tl.constexpr,
    SPINS: tl.constexpr,
    PAUSE: tl.constexpr,
    READER: tl.constexpr,
):
    """As `wait`, for one peer."""
    mine = tl.load(signals + RANK).to(tl.pointer_type(tl.int32)) + program * LINE
    stop = _heard(mine + peer, abort, told, stop, SPINS, PAUSE, READER)
    tl.debug_barrier()
    return stop


@triton.jit
def first_row(program, step, PROGRAMS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Of the program's part number `step`."""
    return ((program + step // PARTS * PROGRAMS) * PARTS + step % PARTS) * ROWS


@triton.jit
def own_rows(partial, experts, local, first, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr):
    """This rank's partial of ROWS rows from `first` on, those there are; with TOP_K the sums of their choices."""
    row, at = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (at < width)[None, :]
    if TOP_K:
        held = held_choices_of_rows(experts, local, first, rows, ROWS, TOP_K)[:, None]
        return sum_choices(partial, row.to(tl.int64)[:, None], held, width, at[None, :], here, TOP_K).to(partial.dtype.element_ty)
    else:
        return tl.load(partial + row.to(tl.int64)[:, None] * width + at[None, :], mask=here, other=0.0)


@triton.jit
def show(buffers, mine, half, to, here, SHARE: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Write rows into this rank's share of every peer's buffer."""
    for r in tl.static_range(WORLD):
        if r != RANK:
            theirs = tl.multiple_of(tl.load(buffers + r).to(tl.pointer_type(mine.dtype)), 16) + half
            tl.store(theirs + (RANK - (1 if r < RANK else 0)) * SHARE + to, mine, mask=here)


@triton.jit
def show_one(buffers, peer, mine, half, to, here, SHARE: tl.constexpr, RANK: tl.constexpr):
    """Write rows into this rank's share of one peer's buffer."""
    theirs = tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(mine.dtype)), 16) + half
    tl.store(theirs + (RANK - (peer < RANK).to(tl.int32)) * SHARE + to, mine, mask=here)


@triton.jit
def total_of(own, mine, to, here, SHARE: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Rows of all ranks, those of the peers from this rank's buffer, added in rank order, in float32.

    A sum is a value of the model's dtype wherever it is made: the reference rounds it there, too.
    """
    value = tl.zeros(mine.shape, tl.float32)
    for r in tl.static_range(WORLD):
        if r == RANK:
            value += mine.to(tl.float32)
        else:
            value += tl.load(own + (r - (1 if r > RANK else 0)) * SHARE + to, mask=here, other=0.0).to(tl.float32)
    return value.to(mine.dtype).to(tl.float32)


@triton.jit
def add_and_norm(x, weight, normed, value, to, here, at, width, eps, ZERO_CENTERED: tl.constexpr):
    """Store the residual, as rounded, with rows added, and the norm of what was stored: that is the result, too."""
    value += tl.load(x + to, mask=here, other=0.0).to(tl.float32)
    rounded = value.to(x.dtype.element_ty)
    tl.store(x + to, rounded, mask=here)
    value = rounded.to(tl.float32)
    factor = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        factor += 1.0
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    result = (value * scale[:, None] * factor[None, :]).to(normed.dtype.element_ty)
    tl.store(normed + to, result, mask=here)
    return result


@triton.jit
def finish(
    value, x, shared, shared_gate, weight, normed, total, row, to, here, at, rows, width, shared_stride, gate_stride, eps,
    ADD: tl.constexpr, SHARED: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """What becomes of a tile of the sum: it is stored, or added to the residual, with a gated part, and normalised."""
    if ADD:
        if SHARED:
            gate = tl.load(shared_gate + row * gate_stride, mask=row < rows, other=0.0).to(tl.float32)
            extra = shared + row.to(tl.int64)[:, None] * shared_stride + at[None, :]
            value += tl.sigmoid(gate)[:, None] * tl.load(extra, mask=here, other=0.0).to(tl.float32)
        add_and_norm(x, weight, normed, value, to, here, at, width, eps, ZERO_CENTERED)
    else:
        tl.store(total + to, value.to(total.dtype.element_ty), mask=here)
