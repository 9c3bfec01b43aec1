"""A sum over ranks of some rows in two shots: each tile goes to the rank that owns it, which adds, and shows the sum to all others.

With n ranks a rank receives the bytes of 2 (n - 1) / n partials, where one shot (`kernels.one_shot_triton`) brings it n - 1. With
two ranks that is the same, and this takes two ways over the link instead of one. Memory, signals, turns, tiles and parts are those
of one shot; a memory serves one of both for an epoch. Part i of program p's tiles belongs to rank (p + i) % world. In call n a
program

1. writes the parts that it does not own into its share of their owners' buffers, and tells each owner `n * tiles + i + 1`;
2. waits for all peers' rows of the parts that it owns, adds them in rank order, and writes the sums into its share of every peer's
   buffer, where its own partial of that part would lie, which nobody needs; it tells all `n * tiles + parts + i + 1`;
3. waits for the owners of all other parts, and reads their sums.

A sum is rounded to the model's dtype before it is shown, as it is wherever it is made, so all ranks have the same bits.

What a rank tells a peer grows from step to step, so a signal that is further on says all that is before it. `tiles` is more than
twice the parts that a program ever has. Two halves suffice here, too, though a rank hears from owners alone: it leaves a call n + 1
of program p after the owner of p's first part has heard from every rank in that call, and who is in p's call n + 1 has ended its
call n. A host that says stop makes its rank tell of sums without what has not come: by then its epoch is closed to its peers, whose
hosts look at nothing that was computed since. No rank waits for one that waits for it: 1 waits for nothing, 2 for what is told in
1, and 3 for what is told in 2.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import triton
import triton.language as tl

from kernels.peer_tiles_triton import finish, first_row, own_rows, show, show_one, tell, tell_one, total_of, wait, wait_one


@triton.jit
def _place(program, step, rows, width, at, PROGRAMS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Of a part: its rows, where their elements lie, and which of them there are."""
    row = first_row(program, step, PROGRAMS, PARTS, ROWS) + tl.arange(0, ROWS)
    here = (row < rows)[:, None] & (at < width)[None, :]
    return row, row.to(tl.int64)[:, None] * width + at[None, :], here


@triton.jit(do_not_specialize=["rows"])
def two_shot_kernel(
    partial, experts, local, x, shared, shared_gate, weight, normed, total, buffers, signals, turns, abort,
    rows, width, shared_stride, gate_stride, eps,
    CAPACITY: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, PROGRAMS: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr, TOP_K: tl.constexpr, ADD: tl.constexpr,
    SHARED: tl.constexpr, ZERO_CENTERED: tl.constexpr, LINE: tl.constexpr, SPINS: tl.constexpr, PAUSE: tl.constexpr,
    READER: tl.constexpr,
):  # fmt: skip
    """One rank's launch; arguments as those of `one_shot_kernel`."""
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    turn = tl.load(turns + program) + 1
    half = (turn & 1).to(tl.int64) * CAPACITY
    dtype: tl.constexpr = partial.dtype.element_ty
    own = tl.multiple_of(tl.load(buffers + RANK).to(tl.pointer_type(dtype)), 16) + half
    stop = tl.full([], 0, tl.int32)
    steps = tl.cdiv(tl.cdiv(rows, PARTS * ROWS) - program, PROGRAMS) * PARTS
    arrived, summed = turn * TILES + 1, turn * TILES + steps + 1
    for step in range(steps):
        owner = (program + step) % WORLD
        if owner != RANK:
            row, to, here = _place(program, step, rows, width, at, PROGRAMS, PARTS, ROWS)
            first = first_row(program, step, PROGRAMS, PARTS, ROWS)
            mine = own_rows(partial, experts, local, first, rows, width, ROWS, BLOCK, TOP_K)
            show_one(buffers, owner, mine, half, to, here, SHARE, RANK)
            tell_one(signals, owner, program, arrived + step, RANK, LINE)
    for step in range((RANK + WORLD - program % WORLD) % WORLD, steps, WORLD):
        row, to, here = _place(program, step, rows, width, at, PROGRAMS, PARTS, ROWS)
        first = first_row(program, step, PROGRAMS, PARTS, ROWS)
        mine = own_rows(partial, experts, local, first, rows, width, ROWS, BLOCK, TOP_K)
        stop = wait(signals, abort, program, arrived + step, stop, RANK, WORLD, LINE, SPINS, PAUSE, READER)
        value = total_of(own, mine, to, here, SHARE, RANK, WORLD)
        show(buffers, value.to(dtype), half, to, here, SHARE, RANK, WORLD)
        tell(signals, program, summed + step, RANK, WORLD, LINE)
        finish(
            value, x, shared, shared_gate, weight, normed, total, row, to, here, at, rows, width, shared_stride, gate_stride, eps,
            ADD, SHARED, ZERO_CENTERED,
        )  # fmt: skip
    for step in range(steps):
        owner = (program + step) % WORLD
        if owner != RANK:
            row, to, here = _place(program, step, rows, width, at, PROGRAMS, PARTS, ROWS)
            stop = wait_one(signals, abort, owner, program, summed + step, stop, RANK, LINE, SPINS, PAUSE, READER)
            theirs = own + (owner - (owner > RANK).to(tl.int32)) * SHARE
            value = tl.load(theirs + to, mask=here, other=0.0).to(tl.float32)
            finish(
                value, x, shared, shared_gate, weight, normed, total, row, to, here, at, rows, width, shared_stride, gate_stride,
                eps, ADD, SHARED, ZERO_CENTERED,
            )  # fmt: skip
    tl.store(turns + program, turn)
