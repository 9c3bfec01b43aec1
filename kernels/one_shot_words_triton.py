"""Sums over ranks of a few rows: each rank writes them into its own place in every peer's memory, in words that carry a number.

A word has 8 bytes, which are written and read as one: 32 bits of data, and the number of the call above them. The reader polls its
own memory until all words of all peers carry the number of its call; no word needs a signal, a fence, or a second way over the
link. Program p owns row p. A 16-bit element shares its word with the one half a row further on; a 32-bit element has its own.

| place | in | written by | read by | meaning |
|---|---|---|---|---|
| `words[h][r][p]` | every rank's buffer | rank r, a peer, if n % 2 = h | its owner | r's row of call n, where a word carries n |
| `turns[p]` | this rank's memory | this rank | this rank | the number of calls that have had a row p |
| `abort[0]` | pinned host memory | this rank's host | this rank | not 0: leave without the peers; the output means nothing |

No peer acknowledges, and no word is overwritten before it is read. Let call n be the n-th that has a row p, the same on all ranks.
Rank a writes words[n % 2][a][p] in b's memory again in call n + 2, after its own call n + 1 has ended. That one has seen all of b's
words of call n + 1. b wrote them after its launch of call n had ended, since kernels of a stream follow each other (dependent
launches write after `gdc_wait`), and so after b had read all words of call n. A word that is not yet a's of call n carries n - 2,
or 0 at the start of an epoch, where all places are cleared while no rank writes; a number comes again after 2^32 calls.

A dependent launch that waits for this one cannot keep a program of this one from running: it comes in when all programs here have
passed their `gdc_wait`, so that they are resident. What its programs then hold of the device, nothing here needs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import triton
import triton.language as tl

from kernels.pairs_triton import held_choices, sum_choices


@triton.jit
def look(word, READER: tl.constexpr):
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
def bits_of(value):
    """The bits of 16- or 32-bit elements as 64-bit integers."""
    if value.dtype.primitive_bitwidth == 32:
        return value.to(tl.uint32, bitcast=True).to(tl.uint64)
    else:
        return value.to(tl.uint16, bitcast=True).to(tl.uint64)


@triton.jit
def element_of(word, dtype: tl.constexpr, SHIFT: tl.constexpr):
    """float32 of the element whose bits begin at SHIFT."""
    if dtype.primitive_bitwidth == 32:
        return word.to(tl.uint32).to(dtype, bitcast=True)
    else:
        return (word >> SHIFT).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def number_of(word):
    """The number of the call that a word was written in."""
    return (word >> 32).to(tl.uint32)


@triton.jit
def factors_of(weight, at, here, half, ZERO_CENTERED: tl.constexpr):
    """The norm's, of both halves of a row."""
    low = tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
    high = tl.load(weight + half + at, mask=here, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        low += 1.0
        high += 1.0
    return low, high


@triton.jit
def own_halves(partial, held, row, at, here, half, TOP_K: tl.constexpr):
    """This rank's row, or with TOP_K the sums of its choices."""
    dtype: tl.constexpr = partial.dtype.element_ty
    if TOP_K:
        low = sum_choices(partial, row, held, 2 * half, at, here, TOP_K).to(dtype)
        high = sum_choices(partial, row, held, 2 * half, half + at, here, TOP_K).to(dtype)
    else:
        to = row * 2 * half + at
        low = tl.load(partial + to, mask=here, other=0.0)
        high = tl.load(partial + to + half, mask=here, other=0.0)
    return low, high


@triton.jit
def shared_halves(shared, shared_gate, row, at, here, half, shared_stride, gate_stride):
    """A shared expert's row, and how far its gate is open."""
    opened = tl.sigmoid(tl.load(shared_gate + row * gate_stride).to(tl.float32))
    extra = shared + row * shared_stride + at
    low = tl.load(extra, mask=here, other=0.0).to(tl.float32)
    high = tl.load(extra + half, mask=here, other=0.0).to(tl.float32)
    return opened, low, high


@triton.jit
def _send(
    buffers, own_low, own_high, mark, place, at, here, half,
    WORDS_AT: tl.constexpr, SLOT: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Write a row into every peer's memory, in words with the call's number, `mark`."""
    for r in tl.static_range(WORLD):
        if r != RANK:
            theirs = tl.load(buffers + r).to(tl.pointer_type(tl.uint64)) + WORDS_AT + RANK * SLOT
            theirs = tl.multiple_of(theirs + place, 16)
            if own_low.dtype.primitive_bitwidth == 32:
                tl.store(theirs + at, bits_of(own_low) | mark, mask=here)
                tl.store(theirs + half + at, bits_of(own_high) | mark, mask=here)
            else:
                tl.store(theirs + at, bits_of(own_low) | (bits_of(own_high) << 16) | mark, mask=here)


@triton.jit
def _look_at_words(
    memory, own_low, own_high, number, place, at, here, half,
    SLOT: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All ranks' rows as they are in this rank's memory, added in rank order, and whether a word of them is late."""
    dtype: tl.constexpr = own_low.dtype
    wide: tl.constexpr = dtype.primitive_bitwidth == 32
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    late = tl.zeros([BLOCK], tl.int32)
    for r in tl.static_range(WORLD):
        if r == RANK:
            low += own_low.to(tl.float32)
            high += own_high.to(tl.float32)
        else:
            mine = tl.multiple_of(memory + r * SLOT + place, 16)
            word = tl.load(mine + at, mask=here, other=0, volatile=True)
            late |= (number_of(word) != number).to(tl.int32)
            low += element_of(word, dtype, 0)
            if wide:
                word = tl.load(mine + half + at, mask=here, other=0, volatile=True)
                late |= (number_of(word) != number).to(tl.int32)
            high += element_of(word, dtype, 0 if wide else 16)
    return low, high, tl.max(tl.where(here, late, 0), 0)


@triton.jit
def add_and_norm_halves(x, normed, low, high, low_more, high_more, low_factor, high_factor, to, here, half, eps):
    """Store the residual, as rounded, with a row added, and the norm of what was stored: that is the result, too."""
    rounded_low = (low + low_more).to(x.dtype.element_ty)
    rounded_high = (high + high_more).to(x.dtype.element_ty)
    tl.store(x + to, rounded_low, mask=here)
    tl.store(x + to + half, rounded_high, mask=here)
    low = rounded_low.to(tl.float32)
    high = rounded_high.to(tl.float32)
    scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * half) + eps)
    low = (low * scale * low_factor).to(normed.dtype.element_ty)
    high = (high * scale * high_factor).to(normed.dtype.element_ty)
    tl.store(normed + to, low, mask=here)
    tl.store(normed + to + half, high, mask=here)
    return low, high


@triton.jit
def one_shot_words_kernel(
    partial, experts, local, x, shared, shared_gate, weight, normed, total, buffers, turns, abort,
    half, shared_stride, gate_stride, eps,
    WORDS_AT: tl.constexpr, SLOT: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    ADD: tl.constexpr, SHARED: tl.constexpr, ZERO_CENTERED: tl.constexpr, SPINS: tl.constexpr, READER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`half` is half of a row's width. Words begin WORDS_AT words into a buffer; a rank has SLOT of them, twice.

    With TOP_K `partial` has the outputs of a row's choices.
    """
    row = tl.program_id(0).to(tl.int64)
    # Two neighbours a thread everywhere: as many words as it writes at a time, so that nothing changes threads.
    at = tl.max_contiguous(tl.arange(0, BLOCK), 2)
    here = at < half
    dtype: tl.constexpr = partial.dtype.element_ty
    wide: tl.constexpr = dtype.primitive_bitwidth == 32
    to = row * 2 * half + at
    # What no launch before this one writes.
    held = None
    if TOP_K:
        held = held_choices(experts, local, row, TOP_K)
    if ADD:
        low_factor, high_factor = factors_of(weight, at, here, half, ZERO_CENTERED)
    memory = tl.load(buffers + RANK).to(tl.pointer_type(tl.uint64)) + WORDS_AT
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    turn = tl.load(turns + row) + 1
    number = turn.to(tl.uint32, bitcast=True)
    own_low, own_high = own_halves(partial, held, row, at, here, half, TOP_K)
    if ADD:
        low_more = tl.load(x + to, mask=here, other=0.0).to(tl.float32)
        high_more = tl.load(x + to + half, mask=here, other=0.0).to(tl.float32)
        if SHARED:
            opened, low_shared, high_shared = shared_halves(shared, shared_gate, row, at, here, half, shared_stride, gate_stride)

    mark = number.to(tl.uint64) << 32
    place = (turn & 1).to(tl.int64) * (WORLD * SLOT) + row * half * (2 if wide else 1)
    _send(buffers, own_low, own_high, mark, place, at, here, half, WORDS_AT, SLOT, RANK, WORLD)

    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    missing = 1
    stop = 0
    spins = 0
    while (missing != 0) & (stop == 0):
        # Every look reads all peers' words, and adds what it has read in rank order: the last one has read the right ones.
        low, high, missing = _look_at_words(memory, own_low, own_high, number, place, at, here, half, SLOT, RANK, WORLD, BLOCK)
        spins += 1
        if spins % SPINS == 0:
            # One thread looks, seldom: the host's word is far. It is only read; see `look`.
            stop = look(abort, "warps" if READER == "warps" else "thread")

    # A sum is a value of the model's dtype wherever it is made: the reference rounds it there, too.
    low = low.to(dtype).to(tl.float32)
    high = high.to(dtype).to(tl.float32)
    if ADD:
        if SHARED:
            low += opened * low_shared
            high += opened * high_shared
        add_and_norm_halves(x, normed, low, high, low_more, high_more, low_factor, high_factor, to, here, half, eps)
    else:
        tl.store(total + to, low.to(dtype), mask=here)
        tl.store(total + to + half, high.to(dtype), mask=here)
    tl.store(turns + row, turn)
