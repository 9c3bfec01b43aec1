"""Kernels compiled ahead: every one that steps of any size need is on the list, and a list that does not come is no fault."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from bisect import bisect_right
from pathlib import Path

import pytest
from msgspec.structs import replace

from ep_runtime.engine.ahead.job import Job, Variant
from ep_runtime.engine.ahead.kept import keep, kept, list_path
from ep_runtime.engine.ahead.rows import covering_rows
from ep_runtime.engine.ahead.start import Compiler, compiling, processes_for
from ep_runtime.engine.setup import buckets_up_to
from tests.support.python_path import python_path

EVERYWHERE = {"_step_kernel", "_prefill_kernel", "_decode_kernel", "_route_kernel", "_gate_up_kernel", "_down_paired_kernel"}
LINEAR = {"_delta_decode_kernel", "_conv_kernel", "_chunk_kernel", "_state_kernel", "_output_kernel"}
SUMS = {"one_shot_words_kernel", "_one_shot_kernel"}


def test_rows_cover_every_kind() -> None:
    """Kinds change at any places; a range is found that holds a power of two, or that no two equal ones enclose."""
    chance = random.Random(3)
    for _ in range(50):
        most = chance.randrange(1, 3000)
        changes = sorted(chance.sample(range(2, 3001), 6))
        chosen = covering_rows(most, lambda rows, changes=changes: bisect_right(changes, rows))
        assert chosen == sorted(set(chosen))
        assert {bisect_right(changes, rows) for rows in chosen} == {bisect_right(changes, rows) for rows in range(1, most + 1)}


def test_rows_of_one_kind_take_few_looks() -> None:
    looks: list[int] = []
    assert covering_rows(8192, lambda rows: looks.append(rows)) == [1]
    assert len(looks) == 14


def test_buckets_are_powers_of_two_and_the_slots() -> None:
    assert [buckets_up_to(slots) for slots in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_processes_leave_a_core_to_each_rank() -> None:
    assert [processes_for(cores, ranks) for cores, ranks in ((1, 1), (2, 1), (16, 2), (64, 2), (4, 8))] == [1, 1, 7, 16, 1]


def test_steps_of_any_size_need_no_other_kernel() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-W", "ignore", "-m", "tests.unit.engine.ahead_steps"]
    environment |= {"PYTHONPATH": python_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    dense, hybrid = json.loads(done.stdout)
    assert dense["new"] == hybrid["new"] == []
    assert set(dense["names"]) > EVERYWHERE
    assert set(hybrid["names"]) > EVERYWHERE | LINEAR | SUMS
    assert dense["numbers"] == hybrid["numbers"] == [], "these are compiled anew for numbers that are multiples of 16"


JOB = Job(
    folder="",
    rank=0,
    world=1,
    dtype="bfloat16",
    layout="replicated",
    device="cpu",
    capability=90,
    block_size=16,
    max_slots=1,
    max_rows=16,
    max_model_len=16,
    buckets=[1],
    peers=False,
    processes=1,
    local_rank=0,
    local_ranks=1,
)


def test_without_a_list_kernels_are_compiled_as_they_are_needed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler = Compiler(replace(JOB, folder=str(tmp_path / "gone")))
    with caplog.at_level(logging.WARNING):
        assert compiler.compiled() == []
    assert "could not be compiled ahead" in caplog.text
    compiler.close()
    late = Compiler(JOB)
    assert late.compiled(patience_s=0.0) == []
    late.close()
    with compiling(None) as load_kernels:
        assert load_kernels() == 0


def test_a_list_is_kept_for_the_same_model_and_the_same_steps(tmp_path: Path) -> None:
    for name, content in (("one", "{}"), ("same", "{}"), ("other", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content, encoding="utf-8")
    one, same, other = (replace(JOB, folder=str(tmp_path / name)) for name in ("one", "same", "other"))
    cache = tmp_path / "cache"
    path = list_path(one, cache)
    assert path == list_path(replace(same, processes=7, local_rank=1, local_ranks=2), cache)
    changed = [other, *(replace(one, **change) for change in ({"rank": 1}, {"max_rows": 17}, {"device": "another"}))]
    assert len({path, *(list_path(job, cache) for job in changed)}) == 1 + len(changed)
    assert kept(path) is None
    variants = [Variant(module="kernels.a", name=name, data="{}") for name in ("b", "c")]
    keep(path, variants)
    assert kept(path) == variants
    assert [file.name for file in cache.iterdir()] == [path.name]
    path.write_bytes(b"{")
    assert kept(path) is None
