"""The scaling benchmark: eight ranks on the CPU, and its pure parts."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ep_runtime.bench.ending import ended
from ep_runtime.bench.plots import save
from ep_runtime.bench.scale import default_worlds, earlier, run_ranks
from ep_runtime.bench.scale_rows import decode_rows, other_rows
from ep_runtime.bench.scale_shares import imbalance, kernel_share
from tests.support.python_path import python_path

FLAGS = [
    "--layouts",
    "replicated",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--ranks",
    "1,8",
    "--batch",
    "1,4",
    "--prompt-len",
    "8",
    "--new-tokens",
    "12",
]
FLAGS += ["--prefill", "2", "--prefill-len", "20", "--requests", "3", "--request-len", "8", "--request-tokens", "4"]


def scale(*flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "ep_runtime.bench", "scale", "--models", "tiny", *FLAGS, *map(str, flags)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)


def test_one_and_eight_ranks_on_the_cpu_are_measured_once(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = scale("--no-collectives", "--out", out)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(out.read_text())
    assert [(part["model"], part["layout"], part["ranks"]) for part in result["parts"]] == [
        ("tiny", "replicated", 1),
        ("tiny", "replicated", 8),
    ]
    for part in result["parts"]:
        assert part["start_seconds"] > part["ready_seconds"] > 0
        assert [row["batch"] for row in part["decode"]] == [row["batch"] for row in part["imbalance"]] == [1, 4]
        assert all(row["step_ms"] > row["floor_ms"] > 0 for row in part["decode"])
        assert part["prefill"][0]["tokens_per_s"] == pytest.approx(2 * 20 / part["prefill"][0]["seconds"])
        assert part["throughput"]["new_tokens_per_s"] == pytest.approx(3 * 4 / part["throughput"]["seconds"])
    one, eight = result["parts"]
    assert [row["collectives_share"] for row in one["decode"]] == [0, 0]
    assert all(0 < row["collectives_share"] < 1 for row in eight["decode"])
    # Two experts a token on eight ranks of one expert each: two ranks have a row, the mean is a quarter.
    assert eight["imbalance"][0] == pytest.approx(
        {"batch": 1, "rows_max_over_mean": 4.0, "experts_max_over_mean": 4.0, "experts_hit_busiest": 1.0}
    )
    again = scale("--no-collectives", "--out", out)
    assert again.returncode == 0
    assert "8 ranks" not in again.stdout
    assert json.loads(out.read_text()) == result


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_that_fails_is_kept_with_its_last_words(ranks: int) -> None:
    found = run_ranks("ep_runtime.bench", ranks, ["decode", "--model", "/nowhere/config.json"], 300.0)
    assert "exit status 1" in found["failed"]
    assert "/nowhere" in found["failed"]


def test_a_part_that_takes_too_long_is_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    assert ended(process, 0.05) is None
    assert process.returncode is not None


STARTS_A_PART = """
from ep_runtime.bench.demo import run_child
from ep_runtime.bench.ending import end_what_was_started
from ep_runtime.bench.scale import run_ranks

end_what_was_started()
{}
"""
LAUNCHER = """
from ep_runtime.bench.ending import end_what_was_started
from ep_runtime.bench.scale import run_ranks

end_what_was_started()
run_ranks("endless", 1, [], 300.0)
"""
START_BELOW = 'run_child(["launcher"], threads=1)'
"""As a child that has a server of its own, in its own session."""

ENDLESS = """
import os, signal

os.write(os.open(os.environ["PIPE"], os.O_WRONLY), b".")
signal.alarm(200)
signal.pause()
"""


@pytest.mark.parametrize("call", ['run_ranks("endless", 1, [], 300.0)', 'run_child(["endless"], threads=1)', START_BELOW])
def test_a_part_ends_with_what_has_started_it(tmp_path: Path, call: str) -> None:
    """The part alone writes into a pipe, whose end tells that it is gone."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    os.mkfifo(pipe := tmp_path / "pipe")
    environment = os.environ | {"PYTHONPATH": python_path(tmp_path), "PIPE": str(pipe)}
    environment.pop("RANK", None)
    process = subprocess.Popen([sys.executable, "-P", "-c", STARTS_A_PART.format(call)], env=environment)
    with pipe.open("rb", buffering=0) as written:
        assert written.read(1) == b"."
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
        assert select.select([written], [], [], 60)[0]
        assert written.read(1) == b""


ENDED_TWICE = """
import signal
from ep_runtime.bench.ending import end_what_was_started

end_what_was_started()
try:
    signal.raise_signal(signal.SIGTERM)
finally:
    signal.raise_signal(signal.SIGTERM)
    print("ended")
"""


def test_a_second_signal_does_not_cut_the_end_short() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-P", "-c", ENDED_TWICE], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "ended\n", "")


def test_only_results_of_scale_are_gone_on_with(tmp_path: Path) -> None:
    assert earlier(None) is None
    assert earlier(tmp_path / "none.json") is None
    (tmp_path / "other.json").write_text('{"benchmark": "decode"}')
    with pytest.raises(ValueError, match=r"other\.json"):
        earlier(tmp_path / "other.json")


def test_ranks_without_gpus() -> None:
    assert default_worlds("cpu") == [1, 2]


def parts() -> list[dict[str, Any]]:
    rates = {2: (100.0, 1000.0), 4: (110.0, 1600.0)}
    measured = [
        {
            "model": "a",
            "layout": "replicated",
            "ranks": ranks,
            "start_seconds": 9.0,
            "decode": [{"batch": batch, "tokens_per_s": rate} for batch, rate in zip((1, 32), rates[ranks], strict=True)],
            "imbalance": [{"batch": 32, "rows_max_over_mean": 1.5}],
            "prefill": [{"prompts": 1, "prompt_len": 10, "tokens_per_s": 5000.0}],
            "throughput": {"seconds": 3.0, "new_tokens_per_s": 7.0},
        }
        for ranks in (4, 2)
    ]
    return [{"model": "a", "layout": "replicated", "ranks": 1, "skipped": "weights do not fit"}, *measured]


def test_efficiency_is_beside_the_fewest_ranks_that_were_measured() -> None:
    rows = decode_rows(parts())
    assert [(row["ranks"], row["batch"], row["efficiency"]) for row in rows] == [
        (4, 1, pytest.approx(0.55)),
        (4, 32, pytest.approx(0.8)),
        (2, 1, 1.0),
        (2, 32, 1.0),
    ]
    assert [row.get("rows_max_over_mean") for row in rows] == [None, 1.5, None, 1.5]
    first, second, _ = other_rows(parts())
    assert first["note"] == "weights do not fit"
    assert (second["start_seconds"], second["seconds"], second["prefill"]) == (9.0, 3.0, "1 x 10: 5,000")


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save(tmp_path / "scale.png", {"benchmark": "scale", "parts": parts()})
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_the_share_of_collectives_in_a_profile() -> None:
    names = {
        "one_shot_kernel": 10.0,
        "one_shot_words_kernel": 20.0,
        "_gate_up_kernel": 50.0,
        "ncclDevKernel_Broadcast_RING_LL": 10.0,
        "vectorized_gather_kernel": 10.0,
        "_merge_kernel": 6.0,
        "_send_kernel": 4.0,
        "_best_kernel": 15.0,
    }
    assert kernel_share([{"name": name, "us_per_step": value} for name, value in names.items()]) == pytest.approx(0.4)
    assert kernel_share([]) == 0.0


def test_imbalance_by_hand() -> None:
    owners = np.array([0, 0, 1, 1])
    # Layer 0: every row has experts 0 and 1, both of rank 0. Layer 1: experts 0 and 2, one of each rank.
    routing = np.array([[[0, 1]] * 5, [[0, 2]] * 5])
    assert imbalance(routing, owners, 2, 3) == pytest.approx(
        {"rows_max_over_mean": (2 + 1) / 2, "experts_max_over_mean": (2 + 1) / 2, "experts_hit_busiest": (2 + 1) / 2}
    )
    assert imbalance(routing, np.zeros(4, int), 1, 8)["rows_max_over_mean"] == 1.0
