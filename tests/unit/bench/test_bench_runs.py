"""The benchmarks from end to end on tiny models: on one rank, under torchrun, with a profile, and the demo against transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ep_runtime.bench import demo
from tests.support.checkpoints import make_checkpoint

COMMON = ["--device", "cpu", "--dtype", "float32", "--prompt-len", "9"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mixtral", "plain", tmp_path_factory.mktemp("bench"))


def bench(*arguments: object, ranks: int = 1) -> str:
    launcher = [] if ranks == 1 else ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command = [sys.executable, "-P", "-m", *launcher, "ep_runtime.bench", *(str(argument) for argument in arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_decode_on_one_rank_and_on_two(folder: Path, tmp_path: Path) -> None:
    rows = {}
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.json"
        text = bench("decode", "--model", folder, *COMMON, "--batch", "1,3", "--new-tokens", 14, "--out", out, ranks=ranks)
        result = read(out)
        assert (result["ranks"], result["dtype"], result["model"]) == (ranks, "float32", folder.name)
        rows[ranks] = result["rows"]
        assert text.count("step/floor") == 1
        for row in rows[ranks]:
            assert row["step_ms"] > row["floor_ms"] > 0
            assert row["steps"] == len(row["intervals_ms"]) > 2
    assert [row["tokens"] for row in rows[1]] == [row["tokens"] for row in rows[2]]
    assert rows[2][0]["bytes"]["head"] < rows[1][0]["bytes"]["head"]


def test_dummy_weights_from_a_config_file_and_a_profile(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["decode", "--model", folder / "config.json", *COMMON, "--batch", "2", "--new-tokens", 40, "--profile"]
    text = bench(*arguments, "--out", out)
    profile = read(out)["profiles"][0]["rows"]
    assert any("addmm" in row["name"] or "mm" in row["name"] for row in profile)
    assert "time of 16 steps by kernel" in text


def test_prefill_and_throughput(folder: Path, tmp_path: Path) -> None:
    prefill, load, picture = tmp_path / "prefill.json", tmp_path / "load.json", tmp_path / "load.png"
    text = bench(
        "prefill",
        "--model",
        folder,
        *COMMON,
        "--batch",
        "1,2",
        "--repeat",
        2,
        "--peer",
        "transformers",
        "--profile",
        "--out",
        prefill,
    )
    result = read(prefill)
    for row in result["rows"]:
        assert row["prompts"] * 9 / row["seconds"] == pytest.approx(row["tokens_per_s"])
        assert row["floor"]["rows"] == row["prompts"] * 9
        assert 0 < row["floor_seconds"] == pytest.approx(row["floor_share"] * row["seconds"])
        assert row["peer_seconds"] == pytest.approx(row["peer_ratio"] * row["seconds"])
    assert text.count("steps by kernel") == 2
    assert all("mm" in "".join(kernel["name"] for kernel in one["rows"]) for one in result["profiles"])
    arguments = ["throughput", "--model", folder, *COMMON, "--requests", 5, "--max-num-seqs", 3, "--new-tokens", 6]
    bench(*arguments, "--out", load, "--plot", picture, ranks=2)
    row = read(load)["rows"][0]
    assert row["seconds"] * row["new_tokens_per_s"] == pytest.approx(5 * 6)
    # Five sequences of 9 + 6 tokens, of which the last is never fed, and nothing computed twice.
    assert (row["floor"]["rows"], row["preemptions"]) == (5 * (9 + 6 - 1), 0)
    assert row["steps"] >= 2 * 6
    assert sum(count for _, count in row["arrivals"]) == 5 * 6
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_decode_beside_transformers(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "peer.json"
    text = bench("decode", "--model", folder, *COMMON, "--batch", "2", "--new-tokens", 14, "--peer", "transformers", "--out", out)
    row = read(out)["rows"][0]
    assert row["same_tokens"] is True
    assert row["peer_ms"] == pytest.approx(row["peer_ratio"] * row["step_ms"])
    assert "transformers ms" in text


def test_start_by_phase(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "start.json"
    arguments = ["startup", "--model", folder / "config.json", "--device", "cpu", "--max-num-seqs", 2, "--max-model-len", 32]
    bench(*arguments, "--ranks", 2, "--no-server", "--out", out)
    (row,) = read(out)["rows"]
    phases = [row[name] for name in ("spawn", "import", "prepare", "load", "capture")]
    assert all(seconds > 0 for seconds in phases)
    assert 0 <= row["compile"] < 0.1, "there is nothing to compile on a CPU"


def test_demo_compares_with_transformers_token_by_token(folder: Path, tmp_path: Path) -> None:
    letters = sorted(set(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(demo.PROMPT)[0][0]) | set("abcĠ"))
    tokenizer = Tokenizer(models.BPE({letter: 3 + place for place, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    out = tmp_path / "demo.json"
    bench("demo", "--model", folder, "--dtypes", "float32", "--new-tokens", 16, "--rounds", 1, "--out", out)
    row = read(out)["rows"][0]
    assert row["same_tokens"] is True
    assert row["ratio"] == pytest.approx(row["peer_ms"] / row["ours_ms"])
    assert row["megabytes"] * 1e6 == sum(row["bytes"].values())
