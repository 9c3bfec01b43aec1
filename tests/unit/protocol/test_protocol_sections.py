"""What a DIGEST ack says of a rank's state, and what is made of it when ranks differ."""

from __future__ import annotations

from protocol.ack import MESSAGE_BYTES, Ack, AckStatus, pack_ack, unpack_ack
from protocol.commands import Span, VisionGrid, Wanted
from protocol.errors import EpDiverged
from protocol.sections import differing, pack_sections, unpack_sections
from protocol.slots import Change, SequenceState, SlotLimits, SlotStatus, SlotTable, apply, table_lines, table_sections
from protocol.verdict import LinkLost, Ok, judge

SECTIONS = {
    "slots": 1,
    "lengths": 2**64 - 1,
    "blocks": 0,
    "conv": 0xABCDEF,
    "h": 5,
    "routing": 2**40 + 7,
    "inputs": 2**33 + 8,
    "rows": 9,
}


def ack(rank: int, digest: int, text: str) -> Ack:
    return unpack_ack(pack_ack(Ack(rank, 3, 17, AckStatus.OK, digest=digest, message=text)))


def test_the_text_holds_the_low_half_of_each_section_and_fits_into_an_ack() -> None:
    text = pack_sections(SECTIONS)
    assert text == (
        "slots=00000001 lengths=ffffffff blocks=00000000 conv=00abcdef h=00000005 routing=00000007 inputs=00000008 rows=00000009"
    )
    assert len(text) < MESSAGE_BYTES
    assert {name: int(value, 16) for name, value in unpack_sections(text).items()} == {
        name: value % 2**32 for name, value in SECTIONS.items()
    }


def test_what_is_cut_or_no_section_is_left_out() -> None:
    assert unpack_sections("slots=00000001 lengths=ffff") == {"slots": "00000001"}
    assert unpack_sections("ValueError: a = b c=") == {}
    assert differing(["a=00000001 b=00000002", "a=00000001"]) == {"b": ["00000002", ""]}


def test_differing_digests_name_the_sections_and_the_ranks() -> None:
    text, other = pack_sections(SECTIONS), pack_sections(SECTIONS | {"lengths": 9, "h": 6})
    outcome = judge([ack(0, 1, text), ack(1, 2, other), ack(2, 1, text)])
    assert isinstance(outcome, LinkLost)
    assert outcome.kind is EpDiverged
    assert outcome.message == (
        "ranks differ in digests of step 17: 0x0000000000000001 on ranks 0, 2; 0x0000000000000002 on rank 1"
        "; lengths: ffffffff on ranks 0, 2; 00000009 on rank 1; h: 00000005 on ranks 0, 2; 00000006 on rank 1"
    )
    assert judge([ack(rank, 1, text) for rank in range(3)]) == Ok(0, 1)


def test_every_fact_of_a_slot_is_in_one_section() -> None:
    limits = SlotLimits(max_slots=4, num_blocks=8, block_size=4, max_length=16, max_rows=16)

    def table(**changes: object) -> SlotTable:
        slots = SlotTable(limits)
        state = SequenceState(slot=1, status=SlotStatus.ACTIVE, length=0, token_budget=9)
        apply(Change(filled=state), slots)
        apply(Change(spans=[Span(1, 0, 5, False, True, Wanted.LAST, [2, 3])]), slots)
        for name, value in changes.items():
            setattr(state, name, value)
        return slots

    base = table_sections(table())
    assert table_sections(table()) == base
    for section, changes in {
        "slots": [
            {"status": SlotStatus.POISONED},
            {"token_budget": 8},
            {"shared_blocks": 1},
            {"adapter": 1},
            {"can_feed": False},
            {"prompt_length": 5},
            {"rows": 3},
            {"skipped": 1},
            {"grids": (VisionGrid(0, 1, 2),)},
        ],
        "lengths": [{"length": 4}, {"length": 6}],
        "blocks": [{"blocks": [3, 2]}, {"blocks": [2]}, {"blocks": [2, 3, 4]}],
    }.items():
        for change in changes:
            altered = table_sections(table(**change))
            assert [name for name in base if base[name] != altered[name]] == [section], change
    assert table_lines(table()) == ["slot 1: ACTIVE, length 5 of 9, blocks 2,3 (0 shared)"]
    with_images = table(grids=(VisionGrid(1, 1, 2), VisionGrid(6, 1, 2)), rows=4)
    assert table_lines(with_images) == ["slot 1: ACTIVE, length 5 of 9, blocks 2,3 (0 shared), 2 grids of images to 8, 4 rows held"]
