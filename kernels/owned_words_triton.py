"""A few rows that ranks own, in words: scatter and gather of `kernels.owned_rows_triton`, each row by one program.

Words, their memory, numbers and turns are those of `kernels.one_shot_words_triton`. In each call every rank writes to every peer: a
row of data where the peer is to have it, and else the row's first words alone, whose data mean nothing. Every rank waits for just
that from every peer. In a scatter data go to the row's owner; in a gather they come from it.

So the owner of a gather hears from ranks that have nothing to tell it but that they are there, and so do ranks of each other: two
words a row, which are on their way while the data are. Without them an owner could run ahead: of three gathers in a row, as in
steps that want no logits of a model with one routed layer, the third would overwrite the first before all have read it. With them
the proof of the sums holds to the letter, for all their calls and these, in any order, whoever owns a row in each of them: rank a
writes words[n % 2][a][p] in b's memory again in call n + 2, after its own call n + 1 has ended, in which it has seen words of b
that b wrote after its call n, and so after it had read all that it waits for in n. A word behind the first ones may be older than
two calls; it is read only where data are waited for, and then it must carry the call's number.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import triton
import triton.language as tl

from kernels.one_shot_words_triton import (
    add_and_norm_halves,
    bits_of,
    element_of,
    factors_of,
    look,
    number_of,
    own_halves,
    shared_halves,
)
from kernels.pairs_triton import held_choices

FIRST_WORDS = tl.constexpr(2)
"""Written, and waited for, where there are no data: as many as a thread moves at a time."""


@triton.jit
def _upto(at, data, half, ELSE: tl.constexpr):
    """Which words of a row are meant: all, or where `data` is not so the first ELSE, an even number of them."""
    return at < tl.multiple_of(tl.where(data, half, ELSE), 2)


@triton.jit
def _send_to(
    theirs, low, high, data, mark, place, at, half,
    WORDS_AT: tl.constexpr, SLOT: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Write a row into one peer's memory, in words with the call's number, `mark`; the first words alone where `data` is not so."""
    theirs = tl.multiple_of(theirs.to(tl.pointer_type(tl.uint64)) + WORDS_AT + RANK * SLOT + place, 16)
    some = _upto(at, data, half, FIRST_WORDS)
    if low.dtype.primitive_bitwidth == 32:
        tl.store(theirs + at, bits_of(low) | mark, mask=some)
        tl.store(theirs + half + at, bits_of(high) | mark, mask=_upto(at, data, half, 0))
    else:
        tl.store(theirs + at, bits_of(low) | (bits_of(high) << 16) | mark, mask=some)


@triton.jit
def _look_at(memory, place, dtype: tl.constexpr, data, number, at, half):
    """float32 halves of a peer's row as it is in this rank's memory, 0 where `data` is not so, and which words of it are late."""
    mine = tl.multiple_of(memory + place, 16)
    wide: tl.constexpr = dtype.primitive_bitwidth == 32
    some, every = _upto(at, data, half, FIRST_WORDS), _upto(at, data, half, 0)
    word = tl.load(mine + at, mask=some, other=0, volatile=True)
    late = (some & (number_of(word) != number)).to(tl.int32)
    low = element_of(word, dtype, 0)
    if wide:
        word = tl.load(mine + half + at, mask=every, other=0, volatile=True)
        late |= (every & (number_of(word) != number)).to(tl.int32)
    high = element_of(word, dtype, 0 if wide else 16)
    return tl.where(every, low, 0.0), tl.where(every, high, 0.0), late


@triton.jit
def owned_scatter_words_kernel(
    partial, experts, local, owners, x, shared, shared_gate, weight, normed, buffers, turns, abort,
    half, shared_stride, gate_stride, eps,
    WORDS_AT: tl.constexpr, SLOT: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, ZERO_CENTERED: tl.constexpr, SPINS: tl.constexpr, READER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Arguments as those of `one_shot_words_kernel`, and the rows' `owners`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.max_contiguous(tl.arange(0, BLOCK), 2)
    here = at < half
    dtype: tl.constexpr = partial.dtype.element_ty
    to = row * 2 * half + at
    # What no launch before this one writes.
    held = None
    if TOP_K:
        held = held_choices(experts, local, row, TOP_K)
    owner = tl.load(owners + row, cache_modifier=".cg").to(tl.int32)
    low_factor, high_factor = factors_of(weight, at, here, half, ZERO_CENTERED)
    memory = tl.load(buffers + RANK).to(tl.pointer_type(tl.uint64)) + WORDS_AT
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    turn = tl.load(turns + row) + 1
    number = turn.to(tl.uint32, bitcast=True)
    mark = number.to(tl.uint64) << 32
    place = (turn & 1).to(tl.int64) * (WORLD * SLOT) + row * half * (dtype.primitive_bitwidth // 16)
    own_low, own_high = own_halves(partial, held, row, at, here, half, TOP_K)
    for r in tl.static_range(WORLD):
        if r != RANK:
            _send_to(tl.load(buffers + r), own_low, own_high, owner == r, mark, place, at, half, WORDS_AT, SLOT, RANK)
    owned = owner == RANK
    live = _upto(at, owned, half, 0)
    low_more = tl.load(x + to, mask=live, other=0.0).to(tl.float32)
    high_more = tl.load(x + to + half, mask=live, other=0.0).to(tl.float32)
    if SHARED:
        opened, low_shared, high_shared = shared_halves(shared, shared_gate, row, at, live, half, shared_stride, gate_stride)

    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    missing = 1
    stop = 0
    spins = 0
    while (missing != 0) & (stop == 0):
        # Every look reads all peers' words, and adds what it has read in rank order: the last one has read the right ones.
        low = tl.zeros([BLOCK], tl.float32)
        high = tl.zeros([BLOCK], tl.float32)
        late = tl.zeros([BLOCK], tl.int32)
        for r in tl.static_range(WORLD):
            if r == RANK:
                low += own_low.to(tl.float32)
                high += own_high.to(tl.float32)
            else:
                low_part, high_part, late_part = _look_at(memory, r * SLOT + place, dtype, owned, number, at, half)
                low += low_part
                high += high_part
                late |= late_part
        missing = tl.max(late, 0)
        spins += 1
        if spins % SPINS == 0:
            stop = look(abort, "warps" if READER == "warps" else "thread")

    # A sum is a value of the model's dtype wherever it is made: the reference rounds it there, too.
    low = low.to(dtype).to(tl.float32)
    high = high.to(dtype).to(tl.float32)
    if SHARED:
        low += opened * low_shared
        high += opened * high_shared
    add_and_norm_halves(x, normed, low, high, low_more, high_more, low_factor, high_factor, to, live, half, eps)
    tl.store(turns + row, turn)


@triton.jit
def owned_gather_words_kernel(
    mixed, owners, x, weight, normed, buffers, turns, abort, half, eps,
    WORDS_AT: tl.constexpr, SLOT: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, SPINS: tl.constexpr, READER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`half` is half of a row's width. Without ADD a rank's own rows are in `normed`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.max_contiguous(tl.arange(0, BLOCK), 2)
    here = at < half
    dtype: tl.constexpr = normed.dtype.element_ty
    to = row * 2 * half + at
    # What no launch before this one writes.
    owner = tl.load(owners + row, cache_modifier=".cg").to(tl.int32)
    if ADD:
        low_factor, high_factor = factors_of(weight, at, here, half, ZERO_CENTERED)
    memory = tl.load(buffers + RANK).to(tl.pointer_type(tl.uint64)) + WORDS_AT
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    turn = tl.load(turns + row) + 1
    number = turn.to(tl.uint32, bitcast=True)
    mark = number.to(tl.uint64) << 32
    place = (turn & 1).to(tl.int64) * (WORLD * SLOT) + row * half * (dtype.primitive_bitwidth // 16)
    owned = owner == RANK
    live = _upto(at, owned, half, 0)
    if ADD:
        low = tl.load(mixed + to, mask=live, other=0.0).to(tl.float32)
        high = tl.load(mixed + to + half, mask=live, other=0.0).to(tl.float32)
        low_more = tl.load(x + to, mask=live, other=0.0).to(tl.float32)
        high_more = tl.load(x + to + half, mask=live, other=0.0).to(tl.float32)
        own_low, own_high = add_and_norm_halves(
            x, normed, low, high, low_more, high_more, low_factor, high_factor, to, live, half, eps
        )
    else:
        own_low = tl.load(normed + to, mask=live, other=0.0)
        own_high = tl.load(normed + to + half, mask=live, other=0.0)
    for r in tl.static_range(WORLD):
        if r != RANK:
            _send_to(tl.load(buffers + r), own_low, own_high, owned, mark, place, at, half, WORDS_AT, SLOT, RANK)

    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    missing = 1
    stop = 0
    spins = 0
    while (missing != 0) & (stop == 0):
        low = tl.zeros([BLOCK], tl.float32)
        high = tl.zeros([BLOCK], tl.float32)
        late = tl.zeros([BLOCK], tl.int32)
        for r in tl.static_range(WORLD):
            if r != RANK:
                low_part, high_part, late_part = _look_at(memory, r * SLOT + place, dtype, owner == r, number, at, half)
                low += low_part
                high += high_part
                late |= late_part
        missing = tl.max(late, 0)
        spins += 1
        if spins % SPINS == 0:
            stop = look(abort, "warps" if READER == "warps" else "thread")

    others = _upto(at, owner != RANK, half, 0)
    tl.store(normed + to, low.to(dtype), mask=others)
    tl.store(normed + to + half, high.to(dtype), mask=others)
    tl.store(turns + row, turn)
