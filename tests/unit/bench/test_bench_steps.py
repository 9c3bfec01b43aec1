"""Steps from arrivals, tables from rows, token ids from a stream's chunks."""

import json
from pathlib import Path

import pytest

from ep_runtime.bench import report
from ep_runtime.bench.demo_http import token_ids
from ep_runtime.bench.session import numbers
from ep_runtime.bench.steps import SETTLE, Arrival, steady_host_ms, steady_intervals, summarise


def test_only_intervals_between_full_steps_count() -> None:
    filling = [Arrival(0.0, 1), Arrival(0.5, 2)]
    full = [Arrival(1.0 + 0.010 * step, 3, 7.0 + (0.0 if step < 4 else 0.002 * step)) for step in range(SETTLE + 4)]
    ending = [Arrival(5.0, 2), Arrival(6.0, 1)]
    intervals = steady_intervals([*filling, *full, *ending], 3)
    assert intervals == pytest.approx([10.0, 10.0, 10.0])
    assert steady_intervals(full, 2) == []
    assert steady_host_ms([*filling, *full, *ending], 3) == pytest.approx(2.0)


def test_summary() -> None:
    times = summarise([1.0, 2.0, 3.0, 10.0])
    assert (times.median, times.mean, times.longest, times.steps) == (2.5, 4.0, 10.0, 4)
    assert 3.0 < times.p90 < 10.0
    with pytest.raises(ValueError, match="too few"):
        summarise([1.0])


def test_table_aligns_and_shows_what_is_absent() -> None:
    rows = [{"a": 1, "b": 0.12345}, {"a": 100, "b": 12345.6}, {"a": True, "b": None}, {"a": 2.5, "b": "x"}]
    assert report.table(rows, {"a": "A", "b": "Bee"}).splitlines() == [
        "   A     Bee",
        "   1   0.123",
        " 100  12,346",
        " yes       -",
        "2.50       x",
    ]


def test_result_file_is_json(tmp_path: Path) -> None:
    report.write(None, {})
    report.write(tmp_path / "out.json", {**report.environment(), "rows": [1]})
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["rows"] == [1]
    assert {"date", "command", "cores", "torch", "ep-runtime"} <= result.keys()


def test_token_ids_of_a_chunk() -> None:
    assert token_ids({"choices": [{"index": 0, "text": "a", "token_ids": [5, 6]}]}) == [5, 6]
    assert token_ids({"choices": [{"index": 0, "text": "", "token_ids": None}]}) == []
    assert token_ids({"choices": [], "usage": {}}) == []


def test_numbers() -> None:
    assert numbers("1,8,32") == [1, 8, 32]
    with pytest.raises(Exception, match="below 1"):
        numbers("4,0")
