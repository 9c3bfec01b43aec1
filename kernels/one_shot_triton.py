"""A sum over ranks of some rows in one shot: each rank shows its partial to the others and adds all of them itself.

A few rows go in words that need no signal: see `kernels.one_shot_words_triton`. More rows go in tiles of some rows, as told here. A
launch has at most PROGRAMS programs, whatever its shape, so that all of them run at once; program p owns every PROGRAMS-th tile. It
writes a tile of the partial into its rank's share of every peer's buffer, in the half that is in turn, tells the peers, reads its
next tile, waits until all have told it of theirs, and adds the ranks' rows in rank order in float32: the same bits on all ranks.
The partial may be pairs: a tile is the sum of its rows' choices then, and goes in parts. The sum can be added to the residual and
normalised in the same launch. The read of a signal that ends a wait acquires, so that plain reads of what the peers have written
may follow it. Other programs use the link while one waits.

| word | in | written by | meaning |
|---|---|---|---|
| `signals[p * line + r]` | every rank's signal memory | rank r, a peer | `n * tiles + i`: i of r's parts of call n are readable |
| `turns[p]` | this rank's memory | this rank | the number of calls that program p has finished |
| `abort[0]` | pinned host memory | this rank's host | not 0: leave without the peers; the output means nothing |

A tile that does not go in parts is one part. `tiles` is more than the parts that a program ever has. Signals only grow, by less
than 2^31 at a time, so that they may pass the largest int32. That holds for the reader `thread`, the default: how the others read
would set a negative one to 0. Two halves suffice: a rank writes half n % 2 again in program p's call n + 2, which it enters only
after every peer has told it of p's call n + 1, and a peer tells of n + 1 only after its call n has ended. What program p writes
lies where only program p ever writes, in every call, in parts or not. Addresses come from device tables, so that graphs can outlive
an epoch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import triton
import triton.language as tl

from kernels.peer_tiles_triton import finish, first_row, own_rows, show, tell, total_of, wait


@triton.jit(do_not_specialize=["rows"])
def one_shot_kernel(
    partial, experts, local, x, shared, shared_gate, weight, normed, total, buffers, signals, turns, abort,
    rows, width, shared_stride, gate_stride, eps,
    CAPACITY: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, PROGRAMS: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr, TOP_K: tl.constexpr, ADD: tl.constexpr,
    SHARED: tl.constexpr, ZERO_CENTERED: tl.constexpr, LINE: tl.constexpr, SPINS: tl.constexpr, PAUSE: tl.constexpr,
    READER: tl.constexpr,
):  # fmt: skip
    """One rank's launch; arguments are `kernels.peer_sums`'s. What is None is left out, and with it what it is for."""
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    turn = tl.load(turns + program) + 1
    half = (turn & 1).to(tl.int64) * CAPACITY
    dtype: tl.constexpr = partial.dtype.element_ty
    own = tl.multiple_of(tl.load(buffers + RANK).to(tl.pointer_type(dtype)), 16) + half
    stop = 0
    told = turn * TILES
    steps = tl.cdiv(tl.cdiv(rows, PARTS * ROWS) - program, PROGRAMS) * PARTS
    first = first_row(program, 0, PROGRAMS, PARTS, ROWS)
    mine = own_rows(partial, experts, local, first, rows, width, ROWS, BLOCK, TOP_K)
    for step in range(steps):
        row = first + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & (at < width)[None, :]
        to = row.to(tl.int64)[:, None] * width + at[None, :]
        show(buffers, mine, half, to, here, SHARE, RANK, WORLD)
        told += 1
        tell(signals, program, told, RANK, WORLD, LINE)
        # What is shown next is read while the peers' rows are on their way.
        first = first_row(program, step + 1, PROGRAMS, PARTS, ROWS)
        following = own_rows(partial, experts, local, first, rows, width, ROWS, BLOCK, TOP_K)
        stop = wait(signals, abort, program, told, stop, RANK, WORLD, LINE, SPINS, PAUSE, READER)
        value = total_of(own, mine, to, here, SHARE, RANK, WORLD)
        finish(
            value, x, shared, shared_gate, weight, normed, total, row, to, here, at, rows, width, shared_stride, gate_stride, eps,
            ADD, SHARED, ZERO_CENTERED,
        )  # fmt: skip
        mine = following
    tl.store(turns + program, turn)
