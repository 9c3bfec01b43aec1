"""What the end of a step is compiled to for sm_90: logits go 16 bytes at a time, and words are released and acquired in order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.python_path import python_path


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[str]]:
    """The lines of PTX of each kernel, by its name and rank."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-W", "ignore", "-m", "tests.unit.kernels.shards_ahead"]
    cache: Path = tmp_path_factory.mktemp("cache")
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": python_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {(name, rank): [line.strip() for line in ptx.splitlines()] for name, rank, ptx in json.loads(done.stdout)}


def places(lines: list[str], *parts: str) -> list[int]:
    """The places of lines that have all `parts`."""
    return [place for place, line in enumerate(lines) if all(part in line for part in parts)]


@pytest.mark.parametrize("name", ["best", "pick", "embed"])
def test_rows_go_16_bytes_at_a_time(compiled: dict[tuple[str, int], list[str]], name: str) -> None:
    lines = compiled[name, 0]
    assert places(lines, "ld.global.v4.b32")
    assert not places(lines, "ld.global.b16")


def test_a_peer_releases_its_words_behind_the_first_of_them(compiled: dict[tuple[str, int], list[str]]) -> None:
    lines = compiled["merge", 1]
    (told,) = places(lines, "atom.global.sys.release.exch.b64")
    (first,) = [place for place in places(lines, "st.global.b64") if place < told]
    assert places(lines, "ld.global.sys.acquire.b32")[0] < first
    assert any(first < place < told for place in places(lines, "bar."))
    assert len(places(lines, "atom.")) == 1


def test_the_head_reads_a_value_behind_the_word_that_tells_of_it(compiled: dict[tuple[str, int], list[str]]) -> None:
    lines = compiled["merge", 0]
    assert places(lines, "ld.global.sys.acquire.b64")
    (value,) = places(lines, "ld.volatile.global.b64")
    (told,) = places(lines, "atom.global.sys.release.exch.b32")
    assert places(lines, "ld.global.sys.acquire.b64")[0] < value < told
    assert any(value < place < told for place in places(lines, "bar."))


def test_the_host_is_only_read(compiled: dict[tuple[str, int], list[str]]) -> None:
    """Signals that others wait for are the only atomic operations; each is of one thread."""
    assert [len(places(compiled[key], "atom.")) for key in (("merge", 0), ("send", 0), ("merge", 1), ("send", 1))] == [1, 0, 1, 1]
    (told,) = places(compiled["send", 1], "atom.global.sys.release.exch.b32")
    assert places(compiled["send", 1], "ld.volatile.global.b64")[-1] < told
