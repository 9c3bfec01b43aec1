"""The simulated control plane: real links, whose ends are in other processes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from ep_runtime.bench import control
from ep_runtime.bench.control import Numbered, StepTimer, open_links


@pytest.mark.parametrize(("way", "processes"), [([], "1"), (["--tcp"], "2")])
def test_every_cell_is_measured(way: list[str], processes: str, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    control.add_arguments(parser)
    out = tmp_path / "out.json"
    flags = ["--ranks", "2,5", "--rows", "1,3", "--steps", "4", "--processes", processes, "--out", str(out), *way]
    control.run(parser.parse_args(flags))
    rows = json.loads(out.read_text())["rows"]
    assert [(row["ranks"], row["rows"]) for row in rows] == [(2, 1), (2, 3), (5, 1), (5, 3)]
    for row in rows:
        parts = [row[name] for name in ("encode_us", "send_us", "collect_us", "judge_us")]
        assert min(parts) > 0
        assert row["head_us"] >= max(parts)
    # A preamble of 44 bytes, and by span at least one byte for each of its fields.
    assert rows[1]["frame_bytes"] - rows[0]["frame_bytes"] > 2 * 6
    assert rows[0]["frame_bytes"] > 44


def test_every_rank_acks_every_step() -> None:
    with open_links(4, 2, tcp=False) as numbered:
        assert numbered.links.world == 4
        timer = StepTimer(numbered, 2)
        for _ in range(3):
            timer.step(0.0)
        assert Numbered.take(numbered) == 3


def test_a_lone_rank_has_no_links() -> None:
    with pytest.raises(SystemExit, match="two ends"), open_links(1, 1, tcp=False):
        pass
