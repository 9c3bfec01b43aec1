"""A command that filled a slot and then failed alike on every rank leaves the table as it was."""

from __future__ import annotations

from protocol.commands import Alloc, Copy
from protocol.slots import SlotLimits, SlotTable, apply, check_integrity, prepare, table_digest, undo

LIMITS = SlotLimits(max_slots=3, num_blocks=8, block_size=4, max_length=16, max_rows=16)


def test_undo_empties_what_alloc_and_copy_filled() -> None:
    table = SlotTable(LIMITS)
    apply(prepare(Alloc(token_budget=8), 0, table, LIMITS), table)
    before = table_digest(table)
    for command in (Alloc(token_budget=8), Copy(source=0, length=0, token_budget=8)):
        change = prepare(command, 1, table, LIMITS)
        apply(change, table)
        assert table[1] is not None
        undo(change, table)
        assert table[1] is None
        assert table_digest(table) == before
        check_integrity(table, LIMITS)
