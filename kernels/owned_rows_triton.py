"""Rows that ranks own, in tiles: partial sums go to a row's owner alone, and rows that it has made go to all others.

Where ranks divide the sequences (layout `data`), `owners[i]` is the rank that keeps row i's sequence, the same on all ranks. The
residual is right in a rank's own rows alone. With n ranks that own as many rows each, either kernel brings a rank (n - 1) / n of
the rows' bytes.

- **scatter**: every rank writes the rows of its partial into its share of their owners' buffers; the owner adds them in rank order
  in float32, the bits that a sum over all rows has, adds them to the residual, and norms. Other rows are left as they are.
- **gather**: an owner adds its mixer's output to the residual, norms, and writes the normed rows into its share of every peer's
  buffer; or, without a residual, it shows rows that are there. All ranks read the rows of others from their owners' shares.

Memory, signals, turns, tiles and parts are those of `kernels.one_shot_triton`, and so is the order of a program's work: it shows a
tile, tells every peer, reads its next tile, waits for every peer. Whose rows are in the tile changes nothing of that: one without a
row for a peer tells it all the same, and waits for it. So what is said there holds here, for owners that change from call to call:
who leaves call n + 1 of program p has heard from every peer in it, and each of these had ended its call n. That is also what two
shots say of their calls, in the same signals. Calls of all these kernels may therefore follow each other in one memory, as long as
they divide rows alike and take `tiles` for one number.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import triton
import triton.language as tl

from kernels.peer_tiles_triton import add_and_norm, finish, first_row, own_rows, show, tell, total_of, wait


@triton.jit
def _owners_of(owners, row, rows):
    """int32, the rank of each row; -1 for those past the last one."""
    return tl.load(owners + row, mask=row < rows, other=-1).to(tl.int32)


@triton.jit
def _show_owners(buffers, mine, owner, half, to, here, SHARE: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Write each row into this rank's share of its owner's buffer, unless that is this rank."""
    for r in tl.static_range(WORLD):
        if r != RANK:
            theirs = tl.multiple_of(tl.load(buffers + r).to(tl.pointer_type(mine.dtype)), 16) + half
            tl.store(theirs + (RANK - (1 if r < RANK else 0)) * SHARE + to, mine, mask=here & (owner == r)[:, None])


@triton.jit(do_not_specialize=["rows"])
def owned_scatter_kernel(
    partial, experts, local, owners, x, shared, shared_gate, weight, normed, buffers, signals, turns, abort,
    rows, width, shared_stride, gate_stride, eps,
    CAPACITY: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, PROGRAMS: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, LINE: tl.constexpr, SPINS: tl.constexpr, PAUSE: tl.constexpr, READER: tl.constexpr,
):  # fmt: skip
    """One rank's launch; arguments are `kernels.peer_rows`'s. What is None is left out, and with it what it is for."""
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
        owner = _owners_of(owners, row, rows)
        inside = (at < width)[None, :]
        to = row.to(tl.int64)[:, None] * width + at[None, :]
        _show_owners(buffers, mine, owner, half, to, inside, SHARE, RANK, WORLD)
        told += 1
        tell(signals, program, told, RANK, WORLD, LINE)
        # What is shown next is read while the peers' rows are on their way.
        first = first_row(program, step + 1, PROGRAMS, PARTS, ROWS)
        following = own_rows(partial, experts, local, first, rows, width, ROWS, BLOCK, TOP_K)
        stop = wait(signals, abort, program, told, stop, RANK, WORLD, LINE, SPINS, PAUSE, READER)
        here = (owner == RANK)[:, None] & inside
        value = total_of(own, mine, to, here, SHARE, RANK, WORLD)
        finish(
            value, x, shared, shared_gate, weight, normed, None, row, to, here, at, rows, width, shared_stride, gate_stride, eps,
            True, SHARED, ZERO_CENTERED,
        )  # fmt: skip
        mine = following
    tl.store(turns + program, turn)


@triton.jit
def _own_normed(
    mixed, owners, x, weight, normed, first, rows, width, eps,
    RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """This rank's own rows among ROWS from `first` on: with ADD made of residual and mixer's output, and stored."""
    row, at = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    here = (_owners_of(owners, row, rows) == RANK)[:, None] & (at < width)[None, :]
    to = row.to(tl.int64)[:, None] * width + at[None, :]
    if ADD:
        value = tl.load(mixed + to, mask=here, other=0.0).to(tl.float32)
        return add_and_norm(x, weight, normed, value, to, here, at, width, eps, ZERO_CENTERED)
    else:
        return tl.load(normed + to, mask=here, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def owned_gather_kernel(
    mixed, owners, x, weight, normed, buffers, signals, turns, abort, rows, width, eps,
    CAPACITY: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, PROGRAMS: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr, ADD: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    LINE: tl.constexpr, SPINS: tl.constexpr, PAUSE: tl.constexpr, READER: tl.constexpr,
):  # fmt: skip
    """One rank's launch; arguments are `kernels.peer_rows`'s. Without ADD its own rows are in `normed`."""
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    turn = tl.load(turns + program) + 1
    half = (turn & 1).to(tl.int64) * CAPACITY
    dtype: tl.constexpr = normed.dtype.element_ty
    own = tl.multiple_of(tl.load(buffers + RANK).to(tl.pointer_type(dtype)), 16) + half
    stop = 0
    told = turn * TILES
    steps = tl.cdiv(tl.cdiv(rows, ROWS) - program, PROGRAMS)
    first = first_row(program, 0, PROGRAMS, 1, ROWS)
    mine = _own_normed(mixed, owners, x, weight, normed, first, rows, width, eps, RANK, ROWS, BLOCK, ADD, ZERO_CENTERED)
    for step in range(steps):
        row = first + tl.arange(0, ROWS)
        owner = _owners_of(owners, row, rows)
        inside = (at < width)[None, :]
        to = row.to(tl.int64)[:, None] * width + at[None, :]
        show(buffers, mine, half, to, (owner == RANK)[:, None] & inside, SHARE, RANK, WORLD)
        told += 1
        tell(signals, program, told, RANK, WORLD, LINE)
        first = first_row(program, step + 1, PROGRAMS, 1, ROWS)
        following = _own_normed(mixed, owners, x, weight, normed, first, rows, width, eps, RANK, ROWS, BLOCK, ADD, ZERO_CENTERED)
        stop = wait(signals, abort, program, told, stop, RANK, WORLD, LINE, SPINS, PAUSE, READER)
        others = ((owner >= 0) & (owner != RANK))[:, None] & inside
        share = (owner - (owner > RANK).to(tl.int32)).to(tl.int64) * SHARE
        tl.store(normed + to, tl.load(own + share[:, None] + to, mask=others, other=0.0), mask=others)
        mine = following
    tl.store(turns + program, turn)
