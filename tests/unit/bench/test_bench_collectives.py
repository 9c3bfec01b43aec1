"""The benchmark of collectives: two ranks on the CPU under torchrun, and its pure parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ep_runtime.bench.collective_cells import Problem, vary
from ep_runtime.bench.collectives import summarise, tabulate
from kernels.peer_memory import PROGRAMS, PeerMemory, Waiting

ROWS = [1, 9]


def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    arguments = [
        "collectives",
        "--device",
        "cpu",
        "--rows",
        "1,9",
        "--width",
        "96",
        "--calls",
        "3",
        "--replays",
        "4",
        "--out",
        str(out),
        "--plot",
        str(picture),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*launcher, "ep_runtime.bench", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(out.read_text())["rows"]
    expected = [(way, count, name) for way in ("gloo", "host memory") for count in ROWS for name in ("reduce", "gather_to_head")]
    assert [(row["variant"], row["rows"], row["collective"]) for row in rows] == expected
    for row in rows:
        assert len(row["replays_us"]) == 4
        assert 0 < row["median_us"] <= row["p90_us"] <= row["max_us"]
    assert done.stdout.count("host memory") == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_exact_sum_is_rounded_once() -> None:
    problem = Problem(2, 64, 0, 3, torch.device("cpu"))
    parts = problem.parts(5)
    assert torch.equal(problem.total(5), (parts[0].float() + parts[1].float() + parts[2].float()).bfloat16())
    assert not torch.equal(parts[0], parts[1])


def test_times_of_replays() -> None:
    assert summarise([3.0, 1.0, 2.0, 100.0]) | {"replays_us": 0} == {
        "median_us": 2.5,
        "p90_us": 100.0,
        "max_us": 100.0,
        "replays_us": 0,
    }
    row = {"collective": "sum", "median_us": 1.0, "p90_us": 2.0, "max_us": 3.0}
    lines, columns = tabulate(
        [row | {"rows": 8, "variant": "a"}, row | {"rows": 1, "variant": "a"}, row | {"rows": 1, "variant": "b"}]
    )
    assert lines == [{"rows": 1, "a": "1.0 / 2.0 / 3.0", "b": "1.0 / 2.0 / 3.0"}, {"rows": 8, "a": "1.0 / 2.0 / 3.0"}]
    assert list(columns) == ["rows", "a", "b"]


def peer_memory() -> PeerMemory:
    empty = torch.zeros(2)
    return PeerMemory(rank=0, world=2, buffers=empty, signals=empty, turns=empty, abort=empty, capacity=64)


def test_variants_of_the_kernels() -> None:
    memory = peer_memory()
    assert vary(memory, "default") == memory
    varied = vary(memory, "programs=64,line=2,word_rows=0,pause=200,spins=64,reader=thread")
    assert (varied.programs, varied.line, varied.word_rows) == (64, 2, 0)
    assert varied.waiting == Waiting(spins=64, pause_ns=200, reader="thread")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("programs=9,colour=3", "colour"),
        ("reader=nobody", "a reader is"),
        ("line=1", "1 words apart"),
        (f"programs={PROGRAMS + 1}", "do not fit"),
        ("programs=0", "do not fit"),
    ],
)
def test_what_is_no_variant_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vary(peer_memory(), text)
