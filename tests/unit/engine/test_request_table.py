"""The head's table of live requests, and when their masks are due."""

from __future__ import annotations

import pytest

from ep_runtime.engine.requests import RequestTable
from protocol.messages import Mask, SamplingParams, Submit


def add(table: RequestTable, request_id: str, *, grammar: bool = True, generated: int = 0) -> None:
    sampling = SamplingParams(seed=0, max_tokens=9, grammar=grammar)
    table.add(Submit(request_id, request_id, [1], sampling, generated=[5] * generated, mask=b"first"))


def test_a_mask_stays_until_a_later_one_is_taken() -> None:
    table = RequestTable()
    add(table, "a", generated=3)
    assert table.take_mask("a", 3) == b"first"
    table.set_mask(Mask("a", 4, b"next"), 1.0)
    assert table.take_mask("a", 3) == b"first"
    assert table.take_mask("a", 4) == b"next"
    with pytest.raises(KeyError):
        table.take_mask("a", 3)


def test_requests_without_a_grammar_or_without_life_have_no_mask() -> None:
    table = RequestTable()
    add(table, "plain", grammar=False)
    assert table.take_mask("plain", 0) is None
    assert table.take_mask("gone", 0) is None


def test_late_masks_are_told_by_their_age() -> None:
    table = RequestTable()
    for name in ("a", "b", "c", "d"):
        add(table, name)
    add(table, "plain", grammar=False)
    for time, name in enumerate(("b", "a", "plain", "c", "d", "nobody")):
        table.expect_mask(name, float(time))
    table.set_mask(Mask("c", 1, b""), 9.0)
    table.remove("d")
    assert [table.late_masks(before) for before in (-1.0, 0.0, 0.5, 9.0)] == [[], ["b"], ["b"], ["b", "a"]]
    table.restart_clocks(20.0)
    assert table.late_masks(19.0) == []
    assert table.late_masks(20.0) == ["b", "a"]
    table.expect_mask("b", 30.0)
    assert table.late_masks(40.0) == ["a", "b"]


def test_more_masks_are_coming_while_all_have_grammars_and_one_came_lately() -> None:
    table = RequestTable()
    assert not table.more_masks_coming(0.0)
    for name in ("a", "b"):
        add(table, name)
        table.expect_mask(name, 1.0)
    assert not table.more_masks_coming(1.0), "none has come"
    table.set_mask(Mask("a", 1, b""), 2.0)
    assert table.more_masks_coming(1.5)
    assert not table.more_masks_coming(2.0)
    add(table, "plain", grammar=False)
    assert not table.more_masks_coming(1.5)
    table.remove("plain")
    table.set_mask(Mask("b", 1, b""), 2.5)
    assert not table.more_masks_coming(1.5), "nothing is awaited"


def test_its_books() -> None:
    table = RequestTable()
    add(table, "a")
    add(table, "b", grammar=False)
    table.check_integrity(["a", "b"])
    for live in ([], ["a"], ["b", "a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="the scheduler"):
            table.check_integrity(live)
    table._due["b"] = 1.0
    with pytest.raises(ValueError, match="masks are due"):
        table.check_integrity(["a", "b"])
    table.remove("b")
    table.remove("a")
    table._due.clear()
    table.check_integrity([])
