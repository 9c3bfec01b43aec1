"""The slot table against refusal tables."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest

from protocol.commands import (
    BATCH,
    Alloc,
    Copy,
    Decode,
    Digest,
    Free,
    Loops,
    Mixed,
    Ping,
    PrefillChunk,
    Shutdown,
    Span,
    VisionGrid,
    Wanted,
    Warm,
)
from protocol.errors import EpCommandFailed, EpDiverged
from protocol.slots import (
    SequenceState,
    SlotLimits,
    SlotStatus,
    SlotTable,
    apply,
    check_integrity,
    check_tokens,
    poison,
    prepare,
    table_digest,
    undo,
)

LIMITS = SlotLimits(
    max_slots=4, num_blocks=12, block_size=4, max_length=24, max_rows=16, world=2, max_adapter=1, max_vision_rows=12
)
RECURRENT = SlotLimits(max_slots=4, num_blocks=12, block_size=4, max_length=24, max_rows=16, recurrent=True)


def span(slot, start, length, blocks=(), fed=False, sampled=False):
    wanted = Wanted.LAST if sampled else Wanted.NONE
    return Span(slot=slot, start=start, length=length, fed=fed, sampled=sampled, wanted=wanted, new_blocks=list(blocks))


def run(table, command, seq_id=BATCH, limits=LIMITS):
    apply(prepare(command, seq_id, table, limits), table)
    check_integrity(table, limits)


def chunk(table, *spans):
    run(table, Mixed(spans=list(spans)))


@pytest.fixture
def table():
    """Slot 0: 10 rows, blocks 0 to 2, sampled. Slot 1: 4 rows, block 3, not sampled. Slot 2: poisoned, block 4. Slot 3: EMPTY."""
    table = SlotTable(LIMITS)
    for slot, budget in enumerate((20, 8, 12)):
        run(table, Alloc(token_budget=budget, owner_rank=slot % 2), slot)
    chunk(table, span(0, 0, 10, (0, 1, 2), sampled=True), span(1, 0, 4, (3,)), span(2, 0, 2, (4,), sampled=True))
    poison(Decode(spans=[span(2, 2, 1)]), table)
    return table


def test_what_commands_leave_in_the_table(table):
    assert table[0] == SequenceState(slot=0, status=SlotStatus.ACTIVE, length=10, token_budget=20, blocks=[0, 1, 2], can_feed=True)
    assert table[1] == SequenceState(slot=1, status=SlotStatus.ACTIVE, length=4, token_budget=8, blocks=[3], owner_rank=1)
    assert table[2] == SequenceState(slot=2, status=SlotStatus.POISONED, length=2, token_budget=12, blocks=[4])
    assert table[3] is None
    run(table, Decode(spans=[span(0, 10, 1, fed=True, sampled=True), span(1, 4, 1, (5,))]))
    assert (table[0].length, table[0].can_feed, table[1].blocks, table[1].can_feed) == (11, True, [3, 5], False)
    run(table, Alloc(token_budget=9, adapter=1, prefix_length=8, prefix_blocks=[0, 1]), 3)
    assert table[3] == SequenceState(
        slot=3, status=SlotStatus.ACTIVE, length=8, token_budget=9, blocks=[0, 1], shared_blocks=2, adapter=1
    )
    run(table, Free(), 0)
    run(table, Free(), 2)
    assert (table[0], table[2]) == (None, None)
    run(table, Copy(source=3, length=6, token_budget=10, shared_blocks=[0], block_pairs=[(1, 4)]), 0)
    assert table[0] == SequenceState(
        slot=0, status=SlotStatus.ACTIVE, length=6, token_budget=10, blocks=[0, 4], shared_blocks=1, adapter=1
    )


def test_blocks_are_those_that_the_command_names_in_its_order(table):
    """Not the next free ones, nor in order: which they are is the head's to say."""
    chunk(table, span(1, 4, 4, (11,)), span(0, 10, 6, (9, 6)))
    run(table, Free(), 2)
    run(table, Alloc(token_budget=12, prefix_length=8, prefix_blocks=[1, 0]), 3)
    chunk(table, span(3, 8, 4, (7,)))
    assert [state and state.blocks for state in table] == [[0, 1, 2, 9, 6], [3, 11], None, [1, 0, 7]]


def test_a_row_that_was_not_sampled_leaves_nothing_to_feed(table):
    """However many rows before it were: the token on the device is an older row's."""
    run(table, Decode(spans=[span(0, 10, 1)]))
    with pytest.raises(EpCommandFailed, match="was not sampled"):
        run(table, Decode(spans=[span(0, 11, 1, fed=True)]))
    run(table, Decode(spans=[span(0, 11, 1, sampled=True)]))
    run(table, Decode(spans=[span(0, 12, 1, (5,), fed=True)]))


REFUSED = {
    "ALLOC of an active slot": (Alloc(token_budget=8), 0, "slot 0 is ACTIVE, not EMPTY"),
    "ALLOC of a poisoned slot": (Alloc(token_budget=8), 2, "slot 2 is POISONED, not EMPTY"),
    "ALLOC out of range": (Alloc(token_budget=8), 4, "slot is 4, there are 4"),
    "ALLOC past the longest sequence": (Alloc(token_budget=25), 3, "budget of slot 3 is 25"),
    "ALLOC of an unknown adapter": (Alloc(token_budget=8, adapter=2), 3, "adapter is 2"),
    "ALLOC of an unknown owner": (Alloc(token_budget=8, owner_rank=2), 3, "owner rank is 2"),
    "ALLOC of a prompt past its budget": (Alloc(token_budget=8, prompt_length=9), 3, "prompt of 9 rows, the budget is 8"),
    "ALLOC with too few prefix blocks": (Alloc(token_budget=20, prefix_length=8, prefix_blocks=[0]), 3, "prefix of 8 rows with 1"),
    "ALLOC with part of a block": (Alloc(token_budget=20, prefix_length=3, prefix_blocks=[0]), 3, "prefix of 3 rows"),
    "ALLOC with a prefix of its whole budget": (Alloc(token_budget=8, prefix_length=8, prefix_blocks=[0, 1]), 3, "leaves none"),
    "ALLOC with a prefix block twice": (Alloc(token_budget=20, prefix_length=8, prefix_blocks=[0, 0]), 3, "block 0 .* twice"),
    "ALLOC with a prefix block out of range": (Alloc(token_budget=9, prefix_length=4, prefix_blocks=[12]), 3, "block 12"),
    "ALLOC with a block still written": (Alloc(token_budget=9, prefix_length=4, prefix_blocks=[2]), 3, "still written by slot 0"),
    "a forward of an empty slot": (PrefillChunk(spans=[span(3, 0, 1, (5,))]), BATCH, "slot 3 is EMPTY, not ACTIVE"),
    "a forward of a poisoned slot": (Decode(spans=[span(2, 2, 1)]), BATCH, "slot 2 is POISONED"),
    "a forward out of range": (Decode(spans=[span(4, 0, 1)]), BATCH, "slot is 4"),
    "a forward out of range behind a new block": (Mixed(spans=[span(0, 10, 3, (5,)), span(4, 0, 1)]), BATCH, "slot is 4"),
    "a slot named twice": (Decode(spans=[span(0, 10, 1), span(0, 11, 1)]), BATCH, "slot 0 is named twice"),
    "length past the budget": (Mixed(spans=[span(1, 4, 5, (5, 6))]), BATCH, "would have 9 rows, its budget is 8"),
    "fed without a sampled row": (Decode(spans=[span(1, 4, 1, (5,), fed=True)]), BATCH, "was not sampled"),
    "blocks missing": (Mixed(spans=[span(0, 10, 3)]), BATCH, "would have 13 rows in 3 blocks of 4"),
    "blocks past the budget": (Mixed(spans=[span(1, 4, 1, (5, 6))]), BATCH, "would have 3 blocks, its budget fills 2"),
    "a block out of range": (Decode(spans=[span(1, 4, 1, (12,))]), BATCH, "block 12 for slot 1, there are 12"),
    "a block of another slot": (Decode(spans=[span(1, 4, 1, (0,))]), BATCH, "block 0 for slot 1 is held by slot 0"),
    "a block that the slot has": (Decode(spans=[span(1, 4, 1, (3,))]), BATCH, "block 3 for slot 1 is held by slot 1"),
    "a block of a poisoned slot": (Decode(spans=[span(1, 4, 1, (4,))]), BATCH, "block 4 for slot 1 is held by slot 2"),
    "a block given twice": (Mixed(spans=[span(0, 10, 3, (5,)), span(1, 4, 1, (5,))]), BATCH, "block 5 for slot 1 is given twice"),
    "FREE out of range": (Free(), 4, "slot is 4"),
    "WARM past the largest forward": (Warm(buckets=[1, 17]), BATCH, r"buckets \[17\] are over"),
    "COPY to an active slot": (Copy(source=1, length=4, token_budget=8, shared_blocks=[3]), 0, "slot 0 is ACTIVE"),
    "COPY to itself": (Copy(source=0, length=4, token_budget=8, shared_blocks=[0]), 0, "slot 0 is ACTIVE"),
    "COPY of an empty slot": (Copy(source=3, length=4, token_budget=8, shared_blocks=[0]), 3, "slot 3 is EMPTY"),
    "COPY of a poisoned slot": (Copy(source=2, length=2, token_budget=8, block_pairs=[(4, 5)]), 3, "slot 2 is POISONED"),
    "COPY past the source": (Copy(source=1, length=5, token_budget=8, shared_blocks=[3]), 3, "length is 5, slot 1 has 4"),
    "COPY past its budget": (Copy(source=0, length=8, token_budget=7, shared_blocks=[0, 1]), 3, "length is 8, the budget is 7"),
    "COPY past the longest": (Copy(source=1, length=4, token_budget=25, shared_blocks=[3]), 3, "budget of slot 3 is 25"),
    "COPY sharing a partial block": (Copy(source=0, length=10, token_budget=20, shared_blocks=[0, 1, 2]), 3, "not full at 10"),
    "COPY short of blocks": (Copy(source=0, length=10, token_budget=20, shared_blocks=[0, 1]), 3, "10 rows need 3"),
    "COPY of other blocks": (Copy(source=0, length=8, token_budget=20, shared_blocks=[1, 0]), 3, "not the first of slot 0"),
    "COPY from another block": (
        Copy(source=0, length=10, token_budget=20, shared_blocks=[0, 1], block_pairs=[(3, 5)]),
        3,
        "not the first of slot 0",
    ),
    "COPY into a held block": (
        Copy(source=0, length=10, token_budget=20, shared_blocks=[0, 1], block_pairs=[(2, 3)]),
        3,
        "block 3 for slot 3 is held by slot 1",
    ),
}


@pytest.mark.parametrize(("command", "seq_id", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_by_name_with_nothing_changed(table, command, seq_id, named):
    before = (copy.deepcopy(list(table)), list(table.users), list(table.writer), table_digest(table))
    with pytest.raises(EpCommandFailed, match=named):
        prepare(command, seq_id, table, LIMITS)
    assert (list(table), table.users, table.writer, table_digest(table)) == before


def test_too_many_rows_in_one_forward(table):
    few = SlotLimits(max_slots=4, num_blocks=12, block_size=4, max_length=24, max_rows=3)
    prepare(Mixed(spans=[span(0, 10, 2), span(1, 4, 1, (5,))]), BATCH, table, few)
    with pytest.raises(EpCommandFailed, match="4 rows, at most 3"):
        prepare(Mixed(spans=[span(0, 10, 2), span(1, 4, 2, (5,))]), BATCH, table, few)


@pytest.mark.parametrize("start", [9, 11, 0])
def test_another_start_than_the_slots_length_is_divergence(table, start):
    with pytest.raises(EpDiverged, match=f"slot 0 starts at {start}, its length is 10"):
        prepare(Decode(spans=[span(0, start, 1)]), BATCH, table, LIMITS)


def test_recurrent_state_is_copied_whole_and_never_shared_as_a_prefix():
    table = SlotTable(RECURRENT)
    run(table, Alloc(token_budget=20), 0, RECURRENT)
    run(table, PrefillChunk(spans=[span(0, 0, 8, (0, 1))]), BATCH, RECURRENT)
    with pytest.raises(EpCommandFailed, match="recurrent state of slot 0 is at 8"):
        prepare(Copy(source=0, length=4, token_budget=8, shared_blocks=[0]), 1, table, RECURRENT)
    run(table, Copy(source=0, length=8, token_budget=8, shared_blocks=[0, 1]), 1, RECURRENT)
    with pytest.raises(EpCommandFailed, match="cannot stand for recurrent state"):
        prepare(Alloc(token_budget=8, prefix_length=4, prefix_blocks=[0]), 2, table, RECURRENT)


def test_a_shared_block_outlives_its_writer_and_is_given_again_when_none_holds_it(table):
    run(table, Copy(source=0, length=8, token_budget=20, shared_blocks=[0, 1]), 3)
    run(table, Free(), 0)
    taken = Decode(spans=[span(1, 4, 1, (0,))])
    with pytest.raises(EpCommandFailed, match="held by slot 3"):
        prepare(taken, BATCH, table, LIMITS)
    run(table, Free(), 3)
    run(table, taken)
    assert table[1].blocks == [3, 0]


def test_free_of_an_empty_slot_changes_nothing(table):
    before = table_digest(table)
    run(table, Free(), 3)
    assert table_digest(table) == before


@pytest.mark.parametrize("command", [Ping(), Digest(), Shutdown(), Warm(buckets=[1, 16])], ids=lambda command: command.cmd.name)
def test_commands_that_move_no_slot(table, command):
    before = table_digest(table)
    run(table, command)
    assert table_digest(table) == before


def test_poison_touches_the_slots_of_a_forward_alone(table):
    poison(Alloc(token_budget=4), table)
    poison(Copy(source=0, length=4, token_budget=4), table)
    assert table[0].status is SlotStatus.ACTIVE
    poison(Decode(spans=[span(0, 10, 1, fed=True)]), table)
    assert (table[0].status, table[0].can_feed, table[1].status) == (SlotStatus.POISONED, False, SlotStatus.ACTIVE)


@pytest.mark.parametrize("applied", [False, True])
def test_undo_empties_the_slot_that_a_failed_command_filled(table, applied):
    before = table_digest(table)
    for command in (
        Alloc(token_budget=20, prefix_length=4, prefix_blocks=[0]),
        Copy(source=0, length=10, token_budget=20, shared_blocks=[0, 1], block_pairs=[(2, 5)]),
    ):
        change = prepare(command, 3, table, LIMITS)
        if applied:
            apply(change, table)
            assert table_digest(table) != before
        undo(change, table)
        check_integrity(table, LIMITS)
        assert table_digest(table) == before
    undo(prepare(Free(), 0, table, LIMITS), table)
    assert table_digest(table) == before


def test_clear_all_is_the_start_of_an_epoch(table):
    table.clear_all()
    check_integrity(table, LIMITS)
    assert list(table) == [None] * 4
    assert table_digest(table) == table_digest(SlotTable(LIMITS))
    assert (set(table.users), set(table.writer)) == ({0}, {-1})


@pytest.mark.parametrize(
    ("slot", "field", "value"),
    [
        (0, "status", SlotStatus.POISONED),
        (0, "length", 9),
        (0, "token_budget", 19),
        (0, "blocks", [0, 2, 1]),
        (0, "blocks", [0, 1]),
        (0, "shared_blocks", 1),
        (0, "adapter", 1),
        (0, "owner_rank", 1),
        (0, "can_feed", False),
        (0, "prompt_length", 1),
        (0, "rows", 1),
        (0, "skipped", 1),
        (0, "grids", (VisionGrid(0, 1, 2),)),
        (0, "loops", Loops(2)),
    ],
)
def test_digest_tells_every_field(table, slot, field, value):
    before = table_digest(table)
    setattr(table[slot], field, value)
    assert table_digest(table) != before


def test_digest_tells_slots_apart_and_is_the_same_in_another_process(table):
    digest = table_digest(table)
    assert 0 <= digest < 2**64
    assert table_digest([table[1], table[0], table[2], table[3]]) != digest
    assert table_digest([*table, None]) != digest
    program = (
        "from protocol.slots import *\n"
        "s = SequenceState(slot=1, status=SlotStatus.ACTIVE, length=3, token_budget=9, blocks=[7], adapter=1)\n"
        "print(table_digest([None, s]))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda table: setattr(table[0], "slot", 1), "slot 0: says it is slot 1"),
        (lambda table: setattr(table[0], "status", SlotStatus.EMPTY), "slot 0: is EMPTY and not None"),
        (lambda table: setattr(table[0], "length", 21), "length 21 is past its budget 20"),
        (lambda table: setattr(table[0], "token_budget", 25), "budget 25 is past 24"),
        (lambda table: setattr(table[0], "length", 13), "3 blocks do not cover length 13"),
        (lambda table: setattr(table[0], "shared_blocks", 3), "3 shared blocks, length 10"),
        (lambda table: table[0].blocks.append(2), "a block twice"),
        (lambda table: table[1].blocks.append(2), "block 2 has 2 users, the index says 1"),
        (lambda table: table[1].blocks.append(2), "block 2 has 2 users and is still written by slot 0"),
        (lambda table: table[0].blocks.pop(), "block 2 has 0 users, the index says 1"),
        (lambda table: table.writer.__setitem__(5, 1), "block 5 has writer 1, which does not hold it"),
        (lambda table: setattr(table[0], "rows", 2), "slot 0: 2 rows of images held, 0 are due"),
        (lambda table: setattr(table[0], "grids", (VisionGrid(9, 1, 2),)), "slot 0: 0 rows of images held, 2 are due"),
        (lambda table: setattr(table[0], "grids", (VisionGrid(2, 1, 2), VisionGrid(3, 1, 1))), "grids .* are not in order"),
        (lambda table: setattr(table, "vision_rows", 1), "slots hold 0 rows of images, the table says 1, the limit 12"),
        (lambda table: table.append(None), "table has 5 slots, not 4"),
    ],
)
def test_check_integrity_names_what_is_wrong(table, damage, named):
    check_integrity(table, LIMITS)
    damage(table)
    with pytest.raises(EpDiverged, match=named):
        check_integrity(table, LIMITS)


def test_tokens_are_in_the_vocabulary():
    check_tokens(0, 9, 10)
    for smallest, largest in [(-1, 3), (0, 10)]:
        with pytest.raises(EpCommandFailed, match="the vocabulary has 10"):
            check_tokens(smallest, largest, 10)
