"""The head's table of live requests, and when their masks are due."""

from __future__ import annotations

import pytest

from ep_runtime.engine.requests import RequestTable
from protocol.messages import Mask, SamplingParams, Submit, VisionInput


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


def shown(digest: bytes, start: int = 0) -> VisionInput:
    return VisionInput(start=start, height=1, width=2, frames=1, digest=digest * 32, pixels=bytes(bytearray(digest * 600)))


def test_pixels_are_kept_once_for_all_requests_that_show_them() -> None:
    table = RequestTable()
    sampling = SamplingParams(seed=0, max_tokens=9)
    for name, images in {"a": [shown(b"1"), shown(b"1", 2)], "b": [shown(b"2"), shown(b"1", 5)]}.items():
        table.add(Submit(name, name, [1], sampling, images=images))
        table.check_integrity(table.ids())
    kept = [image for name in table.ids() for image in table[name].images]
    assert [(image.start, image.pixels[:1]) for image in kept] == [(0, b"1"), (2, b"1"), (0, b"2"), (5, b"1")]
    assert len({id(image.pixels) for image in kept}) == 2
    table.remove("a")
    table.check_integrity(["b"])
    table.add(Submit("c", "c", [1], sampling, images=[shown(b"1")]))
    assert table["c"].images[0].pixels is table["b"].images[1].pixels
    for name in ("b", "c", "nobody"):
        table.remove(name)
    table.check_integrity([])
