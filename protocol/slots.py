"""Whether a command may run on the slot table, and what it will change: the first half of every command.

`prepare` validates and changes nothing; `apply` moves the table in execution. Both depend on the command and the table alone, so
every rank comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from protocol.commands import Alloc, Body, Copy, Forward, Free, Vision, Warm
from protocol.errors import EpCommandFailed, EpDiverged
from protocol.loops import loops_fault, several, span_fault
from protocol.slot_table import (
    Change,
    SequenceState,
    SlotLimits,
    SlotStatus,
    SlotTable,
    apply,
    check_integrity,
    poison,
    table_digest,
    table_lines,
    table_sections,
    undo,
    writable,
)

__all__ = [
    "Change",
    "SequenceState",
    "SlotLimits",
    "SlotStatus",
    "SlotTable",
    "apply",
    "check_integrity",
    "check_tokens",
    "poison",
    "prepare",
    "table_digest",
    "table_lines",
    "table_sections",
    "undo",
]


def prepare(command: Body, seq_id: int, slots: SlotTable, limits: SlotLimits) -> Change:
    """The change that a valid command makes. Nothing is changed here.

    Raises `EpCommandFailed` with the reason, and `EpDiverged` when a span does not start at its slot's length.
    """
    if isinstance(command, Forward):
        return _prepare_forward(command, slots, limits)
    if isinstance(command, Alloc):
        return _prepare_alloc(command, seq_id, slots, limits)
    if isinstance(command, Copy):
        return _prepare_copy(command, seq_id, slots, limits)
    if isinstance(command, Vision):
        return _prepare_vision(command, seq_id, slots, limits)
    if isinstance(command, Free):
        _require(0 <= seq_id < limits.max_slots, f"FREE: slot is {seq_id}, there are {limits.max_slots}")
        return Change(freed=seq_id)
    if isinstance(command, Warm):
        over = [rows for rows in command.buckets if rows > limits.max_rows]
        _require(not over, f"WARM: buckets {over} are over the limit of {limits.max_rows} rows")
    return Change()


def check_tokens(smallest: int, largest: int, vocab_size: int) -> None:
    """Raise `EpCommandFailed` unless given tokens of a forward, by their extremes, are in the vocabulary."""
    _require(smallest >= 0 and largest < vocab_size, f"tokens from {smallest} to {largest}, the vocabulary has {vocab_size}")


def _prepare_forward(command: Forward, slots: SlotTable, limits: SlotLimits) -> Change:
    name = command.cmd.name
    size = limits.block_size
    rows = 0
    most, active = limits.max_slots, SlotStatus.ACTIVE
    named: set[int] = set()
    given: set[int] = set()
    for span in command.spans:
        slot, length = span.slot, span.length
        if slot in named:
            raise EpCommandFailed(f"{name}: slot {slot} is named twice")
        named.add(slot)
        state = slots[slot] if 0 <= slot < most else None  # nearly always, and without a call for each row
        if state is None or state.status is not active:
            state = _active(name, slot, slots, limits)
        if span.start != state.length:
            raise EpDiverged(f"{name}: slot {slot} starts at {span.start}, its length is {state.length}")
        end = span.start + length
        rows += length
        if state.loops is not None or span.depth:
            fault = span_fault(span, state.loops, state.prompt_length)
            _require(fault is None, f"{name}: slot {slot}: {fault}")
        if end > state.token_budget:
            raise EpCommandFailed(f"{name}: slot {slot} would have {end} rows, its budget is {state.token_budget}")
        if span.fed and not state.can_feed:
            raise EpCommandFailed(f"{name}: slot {slot} is fed, but its last row in this epoch was not sampled")
        blocks = len(state.blocks)
        if span.new_blocks:
            blocks += len(span.new_blocks)
            _check_new(name, slot, span.new_blocks, given, slots, limits)
            filled = limits.blocks_for(state.token_budget)
            if blocks > filled:
                raise EpCommandFailed(f"{name}: slot {slot} would have {blocks} blocks, its budget fills {filled}")
        if end > blocks * size:
            raise EpCommandFailed(f"{name}: slot {slot} would have {end} rows in {blocks} blocks of {size}")
    if rows > limits.max_rows:
        raise EpCommandFailed(f"{name}: {rows} rows, at most {limits.max_rows}")
    return Change(spans=command.spans)


def _prepare_alloc(command: Alloc, slot: int, slots: SlotTable, limits: SlotLimits) -> Change:
    _check_empty("ALLOC", slot, slots, limits)
    _check_budget("ALLOC", slot, command.token_budget, limits)
    _require(command.adapter <= limits.max_adapter, f"ALLOC: adapter is {command.adapter}, the highest is {limits.max_adapter}")
    _require(command.owner_rank < limits.world, f"ALLOC: owner rank is {command.owner_rank}, there are {limits.world} ranks")
    _require(
        limits.owners == 1 or command.owner_rank == limits.owner(slot),
        f"ALLOC: owner rank of slot {slot} is {command.owner_rank}, of {limits.owners} owners that is {limits.owner(slot)}",
    )
    prefix, blocks = command.prefix_length, command.prefix_blocks
    _require(
        prefix == len(blocks) * limits.block_size,
        f"ALLOC: prefix of {prefix} rows with {len(blocks)} blocks of {limits.block_size}",
    )
    _require(prefix < command.token_budget, f"ALLOC: prefix of {prefix} rows leaves none of the budget {command.token_budget}")
    _require(
        command.prompt_length <= command.token_budget,
        f"ALLOC: prompt of {command.prompt_length} rows, the budget is {command.token_budget}",
    )
    _require(not (prefix and limits.recurrent), "ALLOC: a prefix of blocks cannot stand for recurrent state")
    _check_shared("ALLOC", slot, blocks, slots, limits)
    _check_loops(command, slot, limits)
    state = SequenceState(
        slot=slot,
        status=SlotStatus.ACTIVE,
        length=prefix,
        token_budget=command.token_budget,
        blocks=list(blocks),
        shared_blocks=len(blocks),
        adapter=command.adapter,
        owner_rank=command.owner_rank,
        prompt_length=command.prompt_length,
        loops=several(command.loops),
    )
    return Change(filled=state)


def _check_loops(command: Alloc, slot: int, limits: SlotLimits) -> None:
    """What more than one loop asks of a slot: a prompt to compute in one piece, so none of it from a prefix."""
    if command.loops is None:
        return
    fault = loops_fault(command.loops, limits.max_loops)
    _require(fault is None, f"ALLOC: slot {slot}: {fault}")
    if several(command.loops) is None:
        return
    prefix, most = command.prefix_length, command.loops.most
    _require(command.prompt_length > 0, f"ALLOC: slot {slot} has {most} loops, and no prompt")
    _require(prefix == 0, f"ALLOC: slot {slot} has {most} loops, and a prefix of {prefix} rows")


def _prepare_copy(command: Copy, slot: int, slots: SlotTable, limits: SlotLimits) -> Change:
    _check_empty("COPY", slot, slots, limits)
    source = _active("COPY", command.source, slots, limits)
    length, shared, pairs = command.length, len(command.shared_blocks), command.block_pairs
    _require(
        limits.owner(slot) == limits.owner(source.slot),
        f"COPY: slot {slot} is of owner {limits.owner(slot)}, slot {source.slot} of {limits.owner(source.slot)}",
    )
    _require(length <= source.length, f"COPY: length is {length}, slot {source.slot} has {source.length} rows")
    _require(
        length == source.length or not limits.recurrent,
        f"COPY: length is {length}, the recurrent state of slot {source.slot} is at {source.length}",
    )
    _check_budget("COPY", slot, command.token_budget, limits)
    _require(length <= command.token_budget, f"COPY: length is {length}, the budget is {command.token_budget}")
    _require(
        shared * limits.block_size <= length, f"COPY: {shared} shared blocks of {limits.block_size} are not full at {length} rows"
    )
    _require(
        shared + len(pairs) == limits.blocks_for(length),
        f"COPY: {shared} shared and {len(pairs)} copied blocks, {length} rows need {limits.blocks_for(length)}",
    )
    if source.before_image_end(length):
        reach = source.grids[-1].stop
        raise EpCommandFailed(f"COPY: length is {length}, the images of slot {source.slot} reach to {reach}; rows are not copied")
    origins = [*command.shared_blocks, *(origin for origin, _ in pairs)]
    _require(
        origins == source.blocks[: len(origins)], f"COPY: blocks {origins} are not the first of slot {source.slot}: {source.blocks}"
    )
    targets = [target for _, target in pairs]
    _check_new("COPY", slot, targets, set(), slots, limits)
    state = SequenceState(
        slot=slot,
        status=SlotStatus.ACTIVE,
        length=length,
        token_budget=command.token_budget,
        blocks=[*command.shared_blocks, *targets],
        shared_blocks=shared,
        adapter=source.adapter,
        owner_rank=source.owner_rank,
        prompt_length=source.prompt_length,
        grids=source.grids,
        loops=source.loops,
    )
    return Change(filled=state)


def _prepare_vision(command: Vision, slot: int, slots: SlotTable, limits: SlotLimits) -> Change:
    _require(limits.max_vision_rows > 0, "VISION: this model takes no images")
    state = _active("VISION", slot, slots, limits)
    _require(not state.grids, f"VISION: slot {slot} has its images already")
    grids, skipped, length = command.grids, command.skipped, state.length
    for left, right in pairwise(grids):
        _require(left.stop <= right.start, f"VISION: the grid at {right.start} begins before the one at {left.start} ends")
    _require(
        grids[-1].stop <= state.prompt_length,
        f"VISION: grids reach to {grids[-1].stop}, the prompt of slot {slot} has {state.prompt_length} rows",
    )
    _require(skipped <= len(grids), f"VISION: {skipped} grids are skipped, there are {len(grids)}")
    if skipped:
        end = grids[skipped - 1].stop
        _require(end <= length, f"VISION: the skipped grids reach to {end}, slot {slot} has {length} rows")
    if skipped < len(grids):
        start = grids[skipped].start
        _require(start >= length, f"VISION: the first grid with rows starts at {start}, slot {slot} has {length} rows already")
    due = sum(grid.stop - grid.start for grid in grids[skipped:])
    _require(command.rows == due, f"VISION: {command.rows} rows for grids of {due}")
    total = slots.vision_rows + due
    _require(total <= limits.max_vision_rows, f"VISION: slots would hold {total} rows, at most {limits.max_vision_rows}")
    return Change(shown=(slot, command))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise EpCommandFailed(message)


def _active(name: str, slot: int, slots: SlotTable, limits: SlotLimits) -> SequenceState:
    if not 0 <= slot < limits.max_slots:
        raise EpCommandFailed(f"{name}: slot is {slot}, there are {limits.max_slots}")
    state = slots[slot]
    if state is None or state.status is not SlotStatus.ACTIVE:
        found = SlotStatus.EMPTY if state is None else state.status
        raise EpCommandFailed(f"{name}: slot {slot} is {found.name}, not ACTIVE")
    return state


def _check_empty(name: str, slot: int, slots: SlotTable, limits: SlotLimits) -> None:
    _require(0 <= slot < limits.max_slots, f"{name}: slot is {slot}, there are {limits.max_slots}")
    state = slots[slot]
    if state is not None:
        raise EpCommandFailed(f"{name}: slot {slot} is {state.status.name}, not EMPTY")


def _check_budget(name: str, slot: int, budget: int, limits: SlotLimits) -> None:
    _require(
        budget <= limits.max_length, f"{name}: budget of slot {slot} is {budget}, the longest sequence has {limits.max_length}"
    )


def _check_new(name: str, slot: int, blocks: Sequence[int], given: set[int], slots: SlotTable, limits: SlotLimits) -> None:
    """Blocks that will be written: in range, named once in the command (`given` collects them), and in no slot's table."""
    first = slots.first_block(slot)
    for block in blocks:
        if not 0 <= block < limits.num_blocks:
            raise EpCommandFailed(f"{name}: block {block} for slot {slot}, there are {limits.num_blocks}")
        number = first + block
        if number in given:
            raise EpCommandFailed(f"{name}: block {block} for slot {slot} is given twice")
        if slots.users[number]:
            raise EpCommandFailed(f"{name}: block {block} for slot {slot} is held by {_holders(number, slots)}")
        given.add(number)


def _check_shared(name: str, slot: int, blocks: Sequence[int], slots: SlotTable, limits: SlotLimits) -> None:
    """Blocks that will only be read: in range, named once, and past what any slot still writes."""
    given: set[int] = set()
    first = slots.first_block(slot)
    for block in blocks:
        if not 0 <= block < limits.num_blocks:
            raise EpCommandFailed(f"{name}: block {block} for slot {slot}, there are {limits.num_blocks}")
        if block in given:
            raise EpCommandFailed(f"{name}: block {block} for slot {slot} is given twice")
        if writable(first + block, slots, limits):
            raise EpCommandFailed(f"{name}: block {block} for slot {slot} is still written by slot {slots.writer[first + block]}")
        given.add(block)


def _holders(number: int, slots: SlotTable) -> str:
    held = [
        str(slot)
        for slot, state in enumerate(slots)
        if state is not None and any(slots.first_block(slot) + block == number for block in state.blocks)
    ]
    return f"slot{'s' * (len(held) > 1)} {', '.join(held)}"
