"""The slot table where ranks divide the sequences: blocks are numbered by owner, and nothing leaves its owner."""

from __future__ import annotations

import pytest

from protocol.commands import BATCH, Alloc, Copy, Decode, Free, Mixed, Span, Wanted
from protocol.errors import EpCommandFailed, EpDiverged
from protocol.slots import SlotLimits, SlotTable, apply, check_integrity, prepare

LIMITS = SlotLimits(max_slots=5, num_blocks=4, block_size=4, max_length=16, max_rows=16, world=3, owners=2)


def span(slot, start, length, blocks=()):
    return Span(slot=slot, start=start, length=length, fed=False, sampled=False, wanted=Wanted.NONE, new_blocks=list(blocks))


def run(table, command, seq_id=BATCH):
    apply(prepare(command, seq_id, table, LIMITS), table)
    check_integrity(table, LIMITS)


@pytest.fixture
def table():
    """Slots 0 and 2 of owner 0 have its blocks 0, 1 and 2; slot 1 of owner 1 has its blocks 0 and 1."""
    table = SlotTable(LIMITS)
    for slot in range(3):
        run(table, Alloc(token_budget=12, owner_rank=slot % 2), slot)
    run(table, Mixed(spans=[span(0, 0, 5, (0, 1)), span(1, 0, 6, (0, 1)), span(2, 0, 4, (2,))]))
    return table


def test_who_keeps_a_slot_and_by_which_number():
    assert [LIMITS.owner(slot) for slot in range(5)] == [0, 1, 0, 1, 0]
    assert [LIMITS.kept(slot, 0) for slot in range(5)] == [0, None, 1, None, 2]
    assert [LIMITS.kept(slot, 1) for slot in range(5)] == [None, 0, None, 1, None]
    assert LIMITS.slots_of_owner == 3
    alike = SlotLimits(max_slots=5, num_blocks=4, block_size=4, max_length=16, max_rows=16, world=3)
    assert [alike.kept(slot, rank) for slot in range(5) for rank in range(2)] == [slot for slot in range(5) for _ in range(2)]
    assert alike.slots_of_owner == 5


def test_who_keeps_a_slot_of_three_owners():
    limits = SlotLimits(max_slots=7, num_blocks=4, block_size=4, max_length=16, max_rows=16, world=3, owners=3)
    assert [limits.owner(slot) for slot in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    kept = [[0, None, None, 1, None, None, 2], [None, 0, None, None, 1, None, None], [None, None, 0, None, None, 1, None]]
    assert [[limits.kept(slot, rank) for slot in range(7)] for rank in range(3)] == kept
    assert limits.slots_of_owner == 3
    table = SlotTable(limits)
    assert [table.first_block(slot) for slot in range(7)] == [0, 4, 8, 0, 4, 8, 0]
    assert len(table.users) == len(table.writer) == 12
    for slot in range(3):
        apply(prepare(Alloc(token_budget=12, owner_rank=slot), slot, table, limits), table)
    apply(prepare(Mixed(spans=[span(slot, 0, 4, (2,)) for slot in range(3)]), BATCH, table, limits), table)
    check_integrity(table, limits)
    assert [number for number, users in enumerate(table.users) if users] == [2, 6, 10]
    with pytest.raises(EpCommandFailed, match="owner rank is 3, there are 3 ranks"):
        prepare(Alloc(token_budget=4, owner_rank=3), 3, table, limits)


def test_a_block_number_is_free_for_each_owner_by_itself(table):
    assert (table[0].blocks, table[1].blocks) == ([0, 1], [0, 1])
    run(table, Decode(spans=[span(1, 6, 1), span(2, 4, 1, (3,))]))
    with pytest.raises(EpCommandFailed, match="block 3 for slot 0 is held by slot 2"):
        prepare(Decode(spans=[span(0, 5, 4, (3,))]), BATCH, table, LIMITS)
    # One command may give the same number to both.
    run(table, Free(), 2)
    run(table, Mixed(spans=[span(0, 5, 4, (3,)), span(1, 7, 2, (3,))]))
    assert sum(table.users) == 6
    run(table, Free(), 0)
    assert sum(table.users) == 3
    table.clear_all()
    assert not any(table.users)
    check_integrity(table, LIMITS)


def test_a_prefix_is_read_from_the_owners_own_blocks(table):
    """Block 0 is full in slot 0 and in slot 1; block 1 is written in both. Block 2 is full, but owner 1 never had it."""
    run(table, Alloc(token_budget=12, owner_rank=1, prefix_length=4, prefix_blocks=[0]), 3)
    assert (table.users[0], table.users[LIMITS.num_blocks]) == (1, 2)
    with pytest.raises(EpCommandFailed, match="block 1 for slot 4 is still written by slot 0"):
        prepare(Alloc(token_budget=12, prefix_length=8, prefix_blocks=[0, 1]), 4, table, LIMITS)


@pytest.mark.parametrize(
    ("command", "slot", "named"),
    [
        (Alloc(token_budget=4), 3, "owner rank of slot 3 is 0, of 2 owners that is 1"),
        (Alloc(token_budget=4, owner_rank=2), 4, "owner rank of slot 4 is 2, of 2 owners that is 0"),
        (Copy(source=0, length=4, token_budget=8, shared_blocks=[0]), 3, "slot 3 is of owner 1, slot 0 of 0"),
    ],
)
def test_nothing_leaves_its_owner(table, command, slot, named):
    with pytest.raises(EpCommandFailed, match=named):
        prepare(command, slot, table, LIMITS)


def test_a_copy_stays_with_its_owner(table):
    run(table, Copy(source=1, length=6, token_budget=8, shared_blocks=[0], block_pairs=[(1, 2)]), 3)
    assert (table[3].blocks, table[3].owner_rank) == ([0, 2], 1)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda table: table.users.__setitem__(5, 0), "block 1 of owner 1 has 1 users, the index says 0"),
        (lambda table: table.writer.__setitem__(5, 0), "block 1 of owner 1 has writer 0, which does not hold it"),
        (lambda table: table.writer.__setitem__(0, 1), "block 0 of owner 0 has writer 1, which does not hold it"),
    ],
)
def test_check_integrity_names_the_owner(table, damage, named):
    damage(table)
    with pytest.raises(EpDiverged, match=named):
        check_integrity(table, LIMITS)
