"""VISION in the slot table: what is refused, how long rows are counted, and what COPY and undo make of them."""

from __future__ import annotations

import copy

import pytest

from protocol.commands import BATCH, Alloc, Copy, Decode, Free, PrefillChunk, Span, Vision, VisionGrid, Wanted
from protocol.errors import EpCommandFailed
from protocol.slots import SlotLimits, SlotTable, apply, check_integrity, poison, prepare, table_digest, undo

LIMITS = SlotLimits(max_slots=5, num_blocks=16, block_size=4, max_length=24, max_rows=24, max_vision_rows=12)
FIRST, SECOND = VisionGrid(2, 2, 2), VisionGrid(9, 1, 3)
"""Positions 2 to 5, and 9 to 11."""


def run(table, command, seq_id=BATCH):
    apply(prepare(command, seq_id, table, LIMITS), table)
    check_integrity(table, LIMITS)


def rows(table, slot, length, blocks=()):
    state = table[slot]
    run(table, PrefillChunk(spans=[Span(slot, state.length, length, False, True, Wanted.LAST, list(blocks))]))


@pytest.fixture
def table():
    """Slots 0 and 1: prompts of 14 rows, slot 1 at 8 and so behind FIRST. Slot 2: FIRST and SECOND. Slot 3: poisoned."""
    table = SlotTable(LIMITS)
    for slot in range(4):
        run(table, Alloc(token_budget=20, prompt_length=14), slot)
    rows(table, 1, 8, (0, 1))
    run(table, Vision(grids=[FIRST, SECOND], rows=7), 2)
    rows(table, 3, 1, (2,))
    poison(Decode(spans=[Span(3, 1, 1, False, False, Wanted.NONE, [])]), table)
    return table


REFUSED = {
    "an empty slot": (Vision(grids=[FIRST], rows=4), 4, "slot 4 is EMPTY, not ACTIVE"),
    "a poisoned slot": (Vision(grids=[FIRST], rows=4), 3, "slot 3 is POISONED"),
    "a slot out of range": (Vision(grids=[FIRST], rows=4), 5, "slot is 5, there are 5"),
    "a slot with images": (Vision(grids=[FIRST], rows=4), 2, "slot 2 has its images already"),
    "out of order": (Vision(grids=[SECOND, FIRST], rows=7), 0, "grid at 2 begins before the one at 9 ends"),
    "overlapping": (Vision(grids=[FIRST, VisionGrid(5, 1, 1)], rows=5), 0, "grid at 5 begins before the one at 2 ends"),
    "the same twice": (Vision(grids=[FIRST, FIRST], rows=8), 0, "grid at 2 begins before the one at 2 ends"),
    "past the prompt": (Vision(grids=[VisionGrid(10, 1, 5)], rows=5), 0, "reach to 15, the prompt of slot 0 has 14 rows"),
    "huge": (Vision(grids=[VisionGrid(0, 2**31 - 1, 2**31 - 1)], rows=1), 0, "the prompt of slot 0 has 14 rows"),
    "more skipped than there are": (Vision(grids=[FIRST], rows=0, skipped=2), 1, "2 grids are skipped, there are 1"),
    "skipped past the length": (Vision(grids=[FIRST, SECOND], rows=3, skipped=1), 0, "skipped grids reach to 6, slot 0 has 0"),
    "all skipped past the length": (Vision(grids=[FIRST, SECOND], rows=0, skipped=2), 1, "reach to 12, slot 1 has 8"),
    "not skipped below the length": (Vision(grids=[FIRST, SECOND], rows=7), 1, "starts at 2, slot 1 has 8 rows already"),
    "across the length": (Vision(grids=[VisionGrid(7, 1, 2)], rows=2), 1, "starts at 7, slot 1 has 8 rows already"),
    "a row too few": (Vision(grids=[FIRST], rows=3), 0, "3 rows for grids of 4"),
    "a row too many": (Vision(grids=[FIRST, SECOND], rows=4, skipped=1), 1, "4 rows for grids of 3"),
    "more rows than all slots may hold": (Vision(grids=[FIRST, VisionGrid(9, 1, 2)], rows=6), 0, "hold 13 rows, at most 12"),
}


@pytest.mark.parametrize(("command", "seq_id", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_by_name_with_nothing_changed(table, command, seq_id, named):
    before = (copy.deepcopy(list(table)), table.vision_rows, table_digest(table))
    with pytest.raises(EpCommandFailed, match=f"^VISION: .*{named}"):
        prepare(command, seq_id, table, LIMITS)
    assert (list(table), table.vision_rows, table_digest(table)) == before


def test_a_model_without_images_refuses_them():
    few = SlotLimits(max_slots=1, num_blocks=4, block_size=4, max_length=16, max_rows=16)
    table = SlotTable(few)
    apply(prepare(Alloc(token_budget=16, prompt_length=16), 0, table, few), table)
    for command in (Vision(grids=[FIRST], rows=4), Vision(grids=[FIRST], rows=0, skipped=1)):
        with pytest.raises(EpCommandFailed, match="this model takes no images"):
            prepare(command, 0, table, few)


def test_rows_are_held_until_the_last_grid_is_passed(table):
    assert (table[2].grids, table[2].rows, table.vision_rows) == ((FIRST, SECOND), 7, 7)
    for length, blocks, held in [(4, (4,), 7), (7, (5, 6), 7), (1, (), 0), (5, (7, 8), 0)]:
        rows(table, 2, length, blocks)
        assert (table[2].rows, table.vision_rows) == (held, held)
    assert table[2].grids == (FIRST, SECOND)
    run(table, Vision(grids=[FIRST, SECOND], rows=7), 0)
    assert table.vision_rows == 7


def test_skipped_grids_have_no_rows(table):
    run(table, Vision(grids=[FIRST, SECOND], rows=3, skipped=1), 1)
    assert (table[1].rows, table[1].skipped, table.vision_rows) == (3, 1, 10)
    rows(table, 1, 1, (4,))
    rows(table, 1, 3)
    assert (table[1].rows, table.vision_rows) == (0, 7)
    run(table, Alloc(token_budget=20, prompt_length=14, prefix_length=8, prefix_blocks=[0, 1]), 4)
    run(table, Vision(grids=[FIRST], rows=0, skipped=1), 4)
    assert (table[4].grids, table[4].rows, table.vision_rows) == ((FIRST,), 0, 7)


def test_rows_go_with_the_slot(table):
    run(table, Vision(grids=[FIRST], rows=4), 0)
    run(table, Free(), 2)
    assert table.vision_rows == 4
    table.clear_all()
    assert table.vision_rows == 0
    check_integrity(table, LIMITS)


def test_a_poisoned_slot_holds_its_rows_until_it_is_freed(table):
    poison(Decode(spans=[Span(2, 0, 1, False, False, Wanted.NONE, [])]), table)
    check_integrity(table, LIMITS)
    assert table.vision_rows == 7
    run(table, Free(), 2)
    assert table.vision_rows == 0


def test_a_copy_has_the_images_behind_it_and_is_refused_before_their_end(table):
    rows(table, 2, 11, (4, 5, 6))
    short = Copy(source=2, length=11, token_budget=20, shared_blocks=[4, 5], block_pairs=[(6, 9)])
    with pytest.raises(EpCommandFailed, match="length is 11, the images of slot 2 reach to 12; rows are not copied"):
        prepare(short, 4, table, LIMITS)
    rows(table, 2, 1)
    with pytest.raises(EpCommandFailed, match="length is 11, the images of slot 2 reach to 12; rows are not copied"):
        prepare(short, 4, table, LIMITS)
    run(table, Copy(source=2, length=12, token_budget=20, shared_blocks=[4, 5, 6]), 4)
    assert (table[4].grids, table[4].prompt_length, table[4].rows) == ((FIRST, SECOND), 14, 0)


@pytest.mark.parametrize("applied", [False, True])
def test_undo_takes_the_images_away_again(table, applied):
    before = (copy.deepcopy(list(table)), table.vision_rows, table_digest(table))
    for command in (Vision(grids=[FIRST], rows=4), Vision(grids=[SECOND], rows=3)):
        change = prepare(command, 0, table, LIMITS)
        if applied:
            apply(change, table)
            assert table.vision_rows == 7 + command.rows
        undo(change, table)
        check_integrity(table, LIMITS)
        assert (list(table), table.vision_rows, table_digest(table)) == before
    run(table, Vision(grids=[FIRST], rows=4), 0)
