"""Tuning tables: which configuration a shape gets, and what is said where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernels.experts_config import experts_config
from kernels.few_rows import few_rows_config
from kernels.tuning import FOLDER, Tuning, TuningTable, load_table, table_path

SHAPE = {"hidden": 64, "dtype": "bfloat16"}


@pytest.fixture
def table(tmp_path: Path) -> TuningTable:
    entry = {"kernel": "experts", "shape": SHAPE, "rows": {"8": {"n": 8}, "128": {"n": 128}, "1": {"n": 1}}}
    table_path("ACME X-1", tmp_path).write_text(json.dumps({"device": "ACME X-1", "entries": [entry]}))
    return load_table("ACME X-1", tmp_path)


@pytest.mark.parametrize(("rows", "tuned"), [(1, 1), (2, 8), (8, 8), (9, 128), (128, 128), (5000, 128)])
def test_the_fewest_tuned_rows_that_hold_them(table: TuningTable, rows: int, tuned: int) -> None:
    assert table.find("experts", dict(reversed(SHAPE.items())), rows) == {"n": tuned}


def test_a_missing_shape_is_reported_once(table: TuningTable) -> None:
    said: list[str] = []
    tuning = Tuning(table, said.append)
    assert tuning.find("experts", SHAPE, 4) == {"n": 8}
    assert said == []
    for rows in (1, 2):
        assert tuning.find("experts", {"hidden": 65}, rows) is None
        assert tuning.find("norm", SHAPE, rows) is None
    assert [message.split()[0] for message in said] == ["experts", "norm"]
    assert "ACME X-1" in said[0]


def test_a_device_without_a_table(tmp_path: Path) -> None:
    assert load_table("Nobody's GPU", tmp_path) == TuningTable("Nobody's GPU", ())
    assert table_path("NVIDIA H200").name == "nvidia_h200.json"


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"device": "X"}', '{"device": "X", "entries": [{"kernel": "a", "shape": {}, "rows": {}}]}']
)
def test_a_malformed_table_names_its_file(tmp_path: Path, text: str) -> None:
    table_path("X", tmp_path).write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        load_table("X", tmp_path)


def test_the_tables_in_the_tree_hold_configurations_of_their_kernels() -> None:
    for path in sorted(FOLDER.glob("*.json")):
        table = load_table(json.loads(path.read_text())["device"])
        assert table_path(table.device) == path
        for entry in table.entries:
            if entry.kernel == "experts":
                assert [experts_config(config).plain() for config in entry.configs] == list(entry.configs)
            if entry.kernel == "few_rows":
                assert [few_rows_config(config).plain() for config in entry.configs] == list(entry.configs)
