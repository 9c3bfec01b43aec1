"""The slot table that every rank mirrors: host state that moves in command order, never from device results.

The table bears an index of blocks, so that the work of a step is proportional to what it changes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from itertools import pairwise

from protocol.commands import Body, Forward, Loops, Span, Vision, VisionGrid
from protocol.errors import EpDiverged

NO_WRITER = -1
_PACKED = struct.Struct("<IBQIII?QQIIBB")
_GRID = struct.Struct("<QQQ")


class SlotStatus(IntEnum):
    """EMPTY slots hold None in the table. DRAINING is the head's own: freed on the wire, results still in flight."""

    EMPTY = 0
    ACTIVE = 1
    DRAINING = 2
    POISONED = 3


@dataclass(kw_only=True, slots=True)
class SequenceState:
    """What every rank knows of the sequence in a slot.

    `length` counts the rows in its state. `blocks` are in position order; the first `shared_blocks` of them came with ALLOC or COPY
    and are never written. `can_feed`: its last row was sampled in this epoch, so its next token is on the device.

    `grids` are those of the images in its prompt, once VISION has named them: the rows of all but the first `skipped` are held on
    the device, `rows` in number, until the length has passed the last grid; then `rows` is 0.

    `loops` are more than one; None is one loop.
    """

    slot: int
    status: SlotStatus
    length: int
    token_budget: int
    blocks: list[int] = field(default_factory=list)
    shared_blocks: int = 0
    adapter: int = 0
    owner_rank: int = 0
    can_feed: bool = False
    prompt_length: int = 0
    grids: tuple[VisionGrid, ...] = ()
    skipped: int = 0
    rows: int = 0
    loops: Loops | None = None

    def before_image_end(self, position: int) -> bool:
        """Whether a row at `position`, or one behind it, is an image's."""
        return bool(self.grids) and position < self.grids[-1].stop


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotLimits:
    """What bounds a command. `max_length` is in rows of one sequence, `max_rows` in rows of one forward.

    `max_vision_rows` bounds the rows of images that all slots together hold; 0: the model takes none. `recurrent`: some layer's
    state cannot be cut at a position, so COPY takes all of its source, and prefixes cannot be shared. `max_loops` is the model's.

    With more than one of `owners`, ranks divide the sequences (attention layout `data`): rank `slot % owners` alone keeps the
    sequence of a slot, as its slot `slot // owners`, in blocks of its own. Every owner has `num_blocks`, each numbered from 0.
    """

    max_slots: int
    num_blocks: int
    block_size: int
    max_length: int
    max_rows: int
    world: int = 1
    max_adapter: int = 0
    max_vision_rows: int = 0
    recurrent: bool = False
    max_loops: int = 1
    owners: int = 1

    @property
    def slots_of_owner(self) -> int:
        """The most slots that one owner has."""
        return -(-self.max_slots // self.owners)

    def owner(self, slot: int) -> int:
        """Which owner keeps the sequence of a slot."""
        return slot % self.owners

    def kept(self, slot: int, rank: int) -> int | None:
        """The number of a slot in the state that `rank` keeps; None when the sequence is another owner's."""
        if self.owners == 1:
            return slot
        return slot // self.owners if slot % self.owners == rank else None

    def blocks_for(self, rows: int) -> int:
        """Blocks that hold `rows` rows."""
        return -(-rows // self.block_size)


class SlotTable(list[SequenceState | None]):
    """`max_slots` entries, None for EMPTY. Entries and their blocks change through `apply`, `poison` and `clear_all` alone.

    `users[b]` counts the slots that name block b; `writer[b]` is the slot that b was given to as a new block, or `NO_WRITER`. There
    block b of owner o is number `o * num_blocks + b`: see `first_block`. `vision_rows` counts the rows of images that all slots
    hold, `looped` the slots of more than one loop.
    """

    def __init__(self, limits: SlotLimits) -> None:
        super().__init__([None] * limits.max_slots)
        self.users = [0] * (limits.owners * limits.num_blocks)
        self.writer = [NO_WRITER] * (limits.owners * limits.num_blocks)
        self._owners, self._num_blocks = limits.owners, limits.num_blocks
        self.vision_rows = 0
        self.looped = 0

    def first_block(self, slot: int) -> int:
        """Where the blocks of the slot's owner begin in `users` and `writer`."""
        return slot % self._owners * self._num_blocks

    def clear_all(self) -> None:
        """Every slot to EMPTY: the start of an epoch."""
        for slot in range(len(self)):
            _free(slot, self)


@dataclass(frozen=True, slots=True)
class Change:
    """What `apply` will do: free a slot, fill a slot (blocks past `shared_blocks` are its own), move lengths by spans.

    `shown` is a slot that has no images yet, and those that it gets.
    """

    freed: int | None = None
    filled: SequenceState | None = None
    spans: Sequence[Span] = ()
    shown: tuple[int, Vision] | None = None


def apply(change: Change, slots: SlotTable) -> None:
    """Move the table. `change` was prepared against this table, with no other change between."""
    if change.freed is not None:
        _free(change.freed, slots)
    if change.filled is not None:
        state = change.filled
        slots[state.slot] = state
        slots.looped += state.loops is not None
        _take(state.blocks, state.shared_blocks, state.slot, slots)
    if change.shown is not None:
        slot, images = change.shown
        seeing = slots[slot]
        assert seeing is not None, f"slot {slot} emptied between prepare and apply"
        seeing.grids, seeing.skipped, seeing.rows = tuple(images.grids), images.skipped, images.rows
        slots.vision_rows += images.rows
    for span in change.spans:
        grown = slots[span.slot]
        assert grown is not None, f"slot {span.slot} emptied between prepare and apply"
        grown.length += span.length
        grown.can_feed = span.sampled
        if span.new_blocks:
            grown.blocks.extend(span.new_blocks)
            _take(span.new_blocks, 0, span.slot, slots)
        if grown.rows and grown.length >= grown.grids[-1].stop:
            _let_rows_go(grown, slots)


def undo(change: Change, slots: SlotTable) -> None:
    """After an ALLOC, COPY or VISION that ran and failed alike on every rank: the slot is EMPTY, or has no images, again."""
    if change.filled is not None:
        _free(change.filled.slot, slots)
    if change.shown is not None:
        state = slots[change.shown[0]]
        if state is not None:
            _let_rows_go(state, slots)
            state.grids, state.skipped = (), 0


def poison(command: Body, slots: SlotTable) -> None:
    """After a forward that ran and failed alike on every rank: the state of its slots is unknown, and only FREE is left to them.

    Other commands that fail leave the table as it was: see `undo`.
    """
    if isinstance(command, Forward):
        for span in command.spans:
            state = slots[span.slot] if span.slot < len(slots) else None
            if state is not None:
                state.status, state.can_feed = SlotStatus.POISONED, False


def table_sections(slots: Sequence[SequenceState | None]) -> dict[str, int]:
    """A u64 each of the slots (all but what follows), their lengths and their block tables, in slot order."""
    held = [(slot, state) for slot, state in enumerate(slots) if state is not None]
    return {
        "slots": _blake(struct.pack("<I", len(slots)), *(part for slot, state in held for part in _facts(slot, state))),
        "lengths": _blake(*(struct.pack("<IQ", slot, state.length) for slot, state in held)),
        "blocks": _blake(
            *(struct.pack(f"<II{len(state.blocks)}I", slot, len(state.blocks), *state.blocks) for slot, state in held)
        ),
    }


def table_digest(slots: Sequence[SequenceState | None]) -> int:
    """A u64 over everything that the table says."""
    return _blake(*(value.to_bytes(8, "little") for value in table_sections(slots).values()))


def table_lines(slots: Sequence[SequenceState | None]) -> list[str]:
    """The table for a person: a line for each slot that is not EMPTY."""
    return [
        f"slot {slot}: {state.status.name}, length {state.length} of {state.token_budget}, "
        f"blocks {','.join(map(str, state.blocks)) or 'none'} ({state.shared_blocks} shared)"
        f"{_images_line(state)}{_loops_line(state)}"
        for slot, state in enumerate(slots)
        if state is not None
    ]


def _facts(slot: int, state: SequenceState) -> list[bytes]:
    thresholds = () if state.loops is None else state.loops.thresholds
    fixed = _PACKED.pack(
        slot,
        state.status,
        state.token_budget,
        state.shared_blocks,
        state.adapter,
        state.owner_rank,
        state.can_feed,
        state.prompt_length,
        state.rows,
        state.skipped,
        len(state.grids),
        0 if state.loops is None else state.loops.most,
        len(thresholds),
    )
    grids = [_GRID.pack(grid.start, grid.height, grid.width) for grid in state.grids]
    return [fixed, *grids, struct.pack(f"<{len(thresholds)}d", *thresholds)]


def _loops_line(state: SequenceState) -> str:
    return f", up to {state.loops.most} loops" if state.loops is not None else ""


def _images_line(state: SequenceState) -> str:
    return f", {len(state.grids)} grids of images to {state.grids[-1].stop}, {state.rows} rows held" if state.grids else ""


def _blake(*parts: bytes) -> int:
    """A u64 of bytes, so that no hash or memory order enters."""
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def check_integrity(slots: SlotTable, limits: SlotLimits) -> None:
    """Recompute the index and every invariant; raises `EpDiverged` naming all that is wrong."""
    faults = []
    users = array("q", [0]) * len(slots.users)
    for slot, state in enumerate(slots):
        if state is None:
            continue
        faults += [f"slot {slot}: {fault}" for fault in _faults(slot, state, limits)]
        first = slots.first_block(slot)
        for block in state.blocks:
            users[first + block] += 1
    held = sum(state.rows for state in slots if state is not None)
    if held != slots.vision_rows or held > limits.max_vision_rows:
        faults.append(f"slots hold {held} rows of images, the table says {slots.vision_rows}, the limit {limits.max_vision_rows}")
    looped = sum(state.loops is not None for state in slots if state is not None)
    if looped != slots.looped:
        faults.append(f"{looped} slots have more than one loop, the table says {slots.looped}")
    if len(slots) != limits.max_slots:
        faults.append(f"table has {len(slots)} slots, not {limits.max_slots}")
    for number, count in enumerate(users):
        faults += _block_faults(number, count, slots, limits)
    if faults:
        raise EpDiverged(f"slot table: {'; '.join(faults)}")


def _block_faults(number: int, users: int, slots: SlotTable, limits: SlotLimits) -> list[str]:
    """What is wrong with an entry of the index of blocks, which `users` slots name."""
    owner, block = divmod(number, limits.num_blocks)
    name = f"block {block}" if limits.owners == 1 else f"block {block} of owner {owner}"
    writer = slots.writer[number]
    faults = []
    if users != slots.users[number]:
        faults.append(f"{name} has {users} users, the index says {slots.users[number]}")
    if writer != NO_WRITER:
        state = slots[writer]
        if state is None or limits.owner(writer) != owner or block not in state.blocks[state.shared_blocks :]:
            faults.append(f"{name} has writer {writer}, which does not hold it")
    if users > 1 and writable(number, slots, limits):
        faults.append(f"{name} has {users} users and is still written by slot {writer}")
    return faults


def _faults(slot: int, state: SequenceState, limits: SlotLimits) -> list[str]:
    blocks = len(state.blocks)
    return [
        text
        for wrong, text in (
            (state.slot != slot, f"says it is slot {state.slot}"),
            (state.status is SlotStatus.EMPTY, "is EMPTY and not None"),
            (state.length > state.token_budget, f"length {state.length} is past its budget {state.token_budget}"),
            (state.token_budget > limits.max_length, f"budget {state.token_budget} is past {limits.max_length}"),
            (blocks < limits.blocks_for(state.length), f"{blocks} blocks do not cover length {state.length}"),
            (state.shared_blocks * limits.block_size > state.length, f"{state.shared_blocks} shared blocks, length {state.length}"),
            (len(set(state.blocks)) != blocks, f"a block twice in {state.blocks}"),
            (state.rows != _rows_due(state), f"{state.rows} rows of images held, {_rows_due(state)} are due"),
            (state.loops is not None and not 1 < state.loops.most <= limits.max_loops, f"{state.loops}, of {limits.max_loops}"),
            (any(left.stop > right.start for left, right in pairwise(state.grids)), f"grids {state.grids} are not in order"),
        )
        if wrong
    ]


def _rows_due(state: SequenceState) -> int:
    """Rows of images that a slot holds at its length."""
    if not state.before_image_end(state.length):
        return 0
    return sum(grid.stop - grid.start for grid in state.grids[state.skipped :])


def writable(number: int, slots: SlotTable, limits: SlotLimits) -> bool:
    """Whether the slot that was given this block of the index may still write rows to it: it holds it past its full blocks."""
    writer = slots.writer[number]
    state = slots[writer] if writer != NO_WRITER else None
    return state is not None and number % limits.num_blocks in state.blocks[state.length // limits.block_size :]


def _take(blocks: Sequence[int], shared: int, slot: int, slots: SlotTable) -> None:
    first = slots.first_block(slot)
    for index, block in enumerate(blocks):
        slots.users[first + block] += 1
        if index >= shared:
            slots.writer[first + block] = slot


def _free(slot: int, slots: SlotTable) -> None:
    state = slots[slot]
    if state is None:
        return
    _let_rows_go(state, slots)
    slots.looped -= state.loops is not None
    slots[slot] = None
    first = slots.first_block(slot)
    for block in state.blocks:
        slots.users[first + block] -= 1
        if slots.writer[first + block] == slot:
            slots.writer[first + block] = NO_WRITER


def _let_rows_go(state: SequenceState, slots: SlotTable) -> None:
    slots.vision_rows -= state.rows
    state.rows = 0
