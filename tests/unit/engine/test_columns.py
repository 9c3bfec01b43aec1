"""The columns of a captured step, from its spans, the tokens that it is given, and the slots' block tables."""

from __future__ import annotations

import numpy as np

from ep_runtime.engine.graphs import FIELDS, columns_of
from protocol.commands import Span, Wanted
from protocol.slots import SequenceState, SlotLimits, SlotStatus, SlotTable

SIZE = 4
LIMITS = SlotLimits(max_slots=5, num_blocks=40, block_size=SIZE, max_length=20, max_rows=8)
TABLE = {0: [7, 2, 9], 2: [30], 4: [11, 12, 13, 14, 15]}


def columns(rows: list[tuple[int, int, bool]], tokens: list[int], shifts: list[int]) -> dict[str, list[int]]:
    slots = SlotTable(LIMITS)
    for slot, blocks in TABLE.items():
        slots[slot] = SequenceState(slot=slot, status=SlotStatus.ACTIVE, length=0, token_budget=20, blocks=blocks)
    spans = [Span(slot, start, 1, fed, True, Wanted.LAST, []) for slot, start, fed in rows]
    made = columns_of(spans, np.array(tokens, np.int32), slots, shifts, SIZE)
    assert (made.dtype, made.shape) == (np.int64, (len(FIELDS), len(rows)))
    return dict(zip(FIELDS, made.tolist(), strict=True))


def test_rows_are_fed_or_given_and_lie_in_their_slots_blocks() -> None:
    assert columns([(4, 18, True), (0, 3, False), (2, 0, False), (0, 4, True)], [101, 102], [0] * 5) == {
        "given": [0, 101, 102, 0],
        "fed": [4, -1, -1, 0],
        "position": [18, 3, 0, 4],
        "slot": [4, 0, 2, 0],
        "length": [19, 4, 1, 5],
        "place": [62, 31, 120, 8],
        "owner": [0, 0, 0, 0],
    }


def test_images_shift_positions_and_nothing_else() -> None:
    plain = columns([(4, 18, True), (0, 3, True)], [], [0] * 5)
    assert columns([(4, 18, True), (0, 3, True)], [], [-2, 0, 9, 0, 5]) == plain | {"position": [23, 1]}
