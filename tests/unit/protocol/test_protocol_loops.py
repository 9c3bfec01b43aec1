"""Slots of more than one loop: what is refused, one by one, and what every rank keeps of them."""

from __future__ import annotations

import pytest

from protocol.commands import BATCH, Alloc, Copy, Decode, Free, Loops, Mixed, PrefillChunk, Span, Wanted, forward_command
from protocol.errors import EpCommandFailed, EpDiverged
from protocol.loops import loops_fault, several
from protocol.slots import SlotLimits, SlotTable, apply, check_integrity, prepare, table_digest, table_lines, undo

LIMITS = SlotLimits(max_slots=5, num_blocks=20, block_size=4, max_length=24, max_rows=24, max_loops=4)
FLAT = SlotLimits(max_slots=5, num_blocks=20, block_size=4, max_length=24, max_rows=24)


def span(slot, start, length=1, blocks=(), depth=0, fed=False, sampled=False):
    wanted = Wanted.LAST if sampled else Wanted.NONE
    return Span(slot, start, length, fed, sampled, wanted, list(blocks), depth)


def run(table, command, seq_id=BATCH):
    apply(prepare(command, seq_id, table, LIMITS), table)
    check_integrity(table, LIMITS)


@pytest.fixture
def table():
    """Slot 0: 3 loops, prompt of 5 done and sampled. Slot 1: 4 loops, prompt of 6 to come. Slot 2: 1 loop, 5 rows. Slot 3: EMPTY.

    Slot 4: 2 loops, prompt of 1 to come.
    """
    table = SlotTable(LIMITS)
    run(table, Alloc(token_budget=20, prompt_length=5, loops=Loops(3, [0.5, 0.75])), 0)
    run(table, Alloc(token_budget=20, prompt_length=6, loops=Loops(4)), 1)
    run(table, Alloc(token_budget=20, prompt_length=9, loops=Loops(1)), 2)
    run(table, Alloc(token_budget=20, prompt_length=1, loops=Loops(2)), 4)
    run(table, Mixed(spans=[span(0, 0, 5, (0, 1), sampled=True), span(2, 0, 5, (2, 3), sampled=True)]))
    return table


def test_more_than_one_loop_is_kept_and_one_is_none(table):
    assert [state and state.loops for state in table] == [Loops(3, [0.5, 0.75]), Loops(4), None, None, Loops(2)]
    assert table.looped == 3
    assert "up to 3 loops" in table_lines(table)[0]
    assert "loops" not in table_lines(table)[2]


ACCEPTED = {
    "a fed row, whose exits decide": span(0, 5, fed=True, sampled=True),
    "a replayed row": span(0, 5, depth=1),
    "a replayed row that ran every loop": span(0, 5, depth=3),
    "the last known token": span(0, 5, sampled=True),
    "a whole prompt": span(1, 0, 6, (4, 5), sampled=True),
    "a whole prompt of one row": span(4, 0, 1, (4,), sampled=True),
    "a prompt's piece of one loop": span(2, 5, 2),
    "a row of one loop": span(2, 5, fed=True, sampled=True),
}


@pytest.mark.parametrize("part", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted(table, part):
    run(table, forward_command([part]))


REFUSED = {
    "the first piece of a prompt": (span(1, 0, 4, (4,)), "slot 1: rows 0 to 3: neither the whole prompt of 6 rows"),
    "one row of a prompt": (span(1, 0, 1, (4,)), "slot 1: row 0: neither the whole prompt of 6 rows"),
    "a prompt and a row behind it": (span(1, 0, 7, (4, 5)), "slot 1: rows 0 to 6: neither the whole prompt of 6 rows"),
    "two rows behind a prompt": (span(0, 5, 2), "slot 0: rows 5 to 6: neither .* nor one row behind it, as 3 loops need"),
    "a fed row and another": (span(0, 5, 2, fed=True), "slot 0: rows 5 to 6: neither"),
    "a depth past the most": (span(0, 5, depth=4), "slot 0: depth of row 5 is 4, it has 3 loops"),
    "a depth of a prompt": (span(1, 0, 6, (4, 5), depth=2), "slot 1: depth of rows 0 to 5 is 2, a prompt has none"),
    "a depth of a prompt of one row": (span(4, 0, 1, (4,), depth=1), "slot 4: depth of row 0 is 1, a prompt has none"),
    "a depth of a slot of one loop": (span(2, 5, depth=1), "slot 2: depth of row 5 is 1, the slot has one loop"),
    "a depth of a fed row": (span(0, 5, depth=2, fed=True), "slot 0: depth of row 5 is 2, and its token is fed"),
}


@pytest.mark.parametrize(("part", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_by_name_with_nothing_changed(table, part, named):
    before = table_digest(table)
    command = forward_command([part])
    with pytest.raises(EpCommandFailed, match=f"{command.cmd.name}: {named}"):
        prepare(command, BATCH, table, LIMITS)
    good = span(2, 5, fed=True) if part.slot != 2 else span(0, 5, fed=True)
    with pytest.raises(EpCommandFailed, match=named):
        prepare(Mixed(spans=[good, part]), BATCH, table, LIMITS)
    assert table_digest(table) == before
    check_integrity(table, LIMITS)


def test_a_row_of_a_looped_slot_elsewhere_than_at_its_length_is_divergence(table):
    with pytest.raises(EpDiverged, match="slot 0 starts at 6, its length is 5"):
        prepare(Decode(spans=[span(0, 6, depth=1)]), BATCH, table, LIMITS)


NOT_ALLOCATED = {
    "more loops than the model has": (Alloc(token_budget=8, prompt_length=2, loops=Loops(5)), "loops are 5, .* at most 4"),
    "a threshold too few": (Alloc(token_budget=8, prompt_length=2, loops=Loops(3, [0.5])), "1 exit thresholds, 3 loops have 2"),
    "a threshold too many": (
        Alloc(token_budget=8, prompt_length=2, loops=Loops(2, [0.5, 0.5])),
        "2 exit thresholds, 2 loops have 1",
    ),
    "a threshold of one loop": (Alloc(token_budget=8, prompt_length=2, loops=Loops(1, [0.5])), "1 exit thresholds, 1 loops have 0"),
    "no prompt": (Alloc(token_budget=8, loops=Loops(2)), "slot 3 has 2 loops, and no prompt"),
    "a prefix": (
        Alloc(token_budget=8, prompt_length=5, prefix_length=4, prefix_blocks=[0], loops=Loops(2)),
        "slot 3 has 2 loops, and a prefix of 4 rows",
    ),
}


@pytest.mark.parametrize(("command", "named"), NOT_ALLOCATED.values(), ids=NOT_ALLOCATED.keys())
def test_alloc_is_refused_with_nothing_changed(table, command, named):
    before = table_digest(table)
    with pytest.raises(EpCommandFailed, match=f"ALLOC: slot 3.*{named.removeprefix('slot 3')}"):
        prepare(command, 3, table, LIMITS)
    assert table_digest(table) == before


def test_a_model_that_is_not_looped_has_one_loop():
    with pytest.raises(EpCommandFailed, match="ALLOC: slot 0: loops are 2, this model has 1: it is not looped"):
        prepare(Alloc(token_budget=8, prompt_length=2, loops=Loops(2)), 0, SlotTable(FLAT), FLAT)
    assert prepare(Alloc(token_budget=8, loops=Loops(1)), 0, SlotTable(FLAT), FLAT).filled.loops is None


@pytest.mark.parametrize(
    ("loops", "fault"),
    [
        (Loops(1), None),
        (Loops(4), None),
        (Loops(4, [0.0, 0.5, 1.0]), None),
        (Loops(5), "at most 4"),
        (Loops(4, [0.5]), "4 loops have 3, or none"),
        (Loops(4, [0.5] * 4), "4 loops have 3, or none"),
    ],
)
def test_what_a_model_of_four_loops_can_do(loops, fault):
    found = loops_fault(loops, 4)
    assert found is None if fault is None else fault in found


def test_several():
    assert several(None) is several(Loops(1)) is None
    assert several(Loops(2)) == Loops(2)


def test_a_copy_has_its_sources_loops_and_rules(table):
    run(table, Copy(source=0, length=5, token_budget=20, shared_blocks=[0], block_pairs=[(1, 6)]), 3)
    assert table[3].loops == Loops(3, [0.5, 0.75])
    assert table.looped == 4
    with pytest.raises(EpCommandFailed, match="slot 3: rows 5 to 6"):
        prepare(Mixed(spans=[span(3, 5, 2)]), BATCH, table, LIMITS)
    run(table, Decode(spans=[span(3, 5, depth=2)]))


def test_the_number_of_looped_slots_follows_every_move(table):
    run(table, Free(), 0)
    run(table, Free(), 2)
    run(table, Free(), 3)
    assert table.looped == 2
    change = prepare(Alloc(token_budget=20, prompt_length=5, loops=Loops(3)), 0, table, LIMITS)
    undo(change, table)
    assert table.looped == 2
    apply(change, table)
    assert table.looped == 3
    undo(change, table)
    assert table.looped == 2
    check_integrity(table, LIMITS)
    table.clear_all()
    assert table.looped == 0
    check_integrity(table, LIMITS)
    table.looped = 1
    with pytest.raises(EpDiverged, match="0 slots have more than one loop, the table says 1"):
        check_integrity(table, LIMITS)


@pytest.mark.parametrize("loops", [Loops(1), Loops(5)])
def test_loops_that_no_command_leaves_are_named(table, loops):
    table[0].loops = loops
    with pytest.raises(EpDiverged, match=r"slot 0: Loops.*, of 4"):
        check_integrity(table, LIMITS)


@pytest.mark.parametrize("loops", [None, Loops(2), Loops(4), Loops(3), Loops(3, [0.5, 0.5]), Loops(3, [0.75, 0.5])])
def test_the_digest_tells_loops_apart(table, loops):
    before = table_digest(table)
    table[0].loops = loops
    assert table_digest(table) != before
    table[0].loops = Loops(3, [0.5, 0.75])
    assert table_digest(table) == before


def test_a_prompt_piece_is_a_prefill_and_replayed_rows_are_a_decode(table):
    assert type(forward_command([span(1, 0, 6, (4, 5))])) is PrefillChunk
    assert type(forward_command([span(0, 5, depth=2), span(2, 5, fed=True)])) is Decode
