"""`bench serve` against a real server of a tiny model: what it counts must be what was planned, however it is driven."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ep_runtime.bench.__main__ import main
from ep_runtime.bench.configs import CONFIGS
from ep_runtime.bench.recovery import write_tokenizer
from ep_runtime.bench.serve import default_clients
from ep_runtime.bench.serve_load import LoadShape, plan_load
from ep_runtime.bench.served import Served
from ep_runtime.bench.served_flags import server_flags
from ep_runtime.bench.tiny import VOCAB, write_tiny
from ep_runtime.frontend.text.tokenizer import Tokenizer

LENGTHS = ["--random-input-len", "12", "--random-output-len", "8", "--random-range-ratio", "0.5", "--seed", "4"]
PNG = b"\x89PNG"
MEANS = [f"{kind}_{name}_ms" for kind in ("mean", "median", "p90", "p99") for name in ("ttft", "tpot", "itl", "e2el")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    model = folder / "model"
    model.mkdir()
    write_tiny(model)
    flags, vocab_size = server_flags(
        model, "tiny", folder, device="cpu", dtype="float32", load_format="auto", max_model_len=64, max_num_seqs=4
    )
    assert vocab_size == VOCAB
    served = Served(1, flags, folder / "log")
    yield served
    served.close()


def planned(count: int, rate: float) -> tuple[int, int]:
    shape = LoadShape(num_prompts=count, request_rate=rate, input_len=12, output_len=8, range_ratio=0.5, vocab_size=VOCAB, seed=4)
    load = plan_load(shape)
    return sum(len(one.prompt) for one in load), sum(one.output_len for one in load)


def test_a_running_server_is_driven_by_two_clients(server: Served, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["serve", "--url", f"http://127.0.0.1:{server.port}", "--vocab-size", str(VOCAB), "--num-prompts", "12"]
    arguments += ["--request-rate", "50", *LENGTHS, "--max-concurrency", "2", "--clients", "2", "--goodput", "ttft:60000", "e2el:0"]
    main([*arguments, "--save-detailed", "--out", str(out), "--plot", str(picture)])
    result: dict[str, Any] = json.loads(out.read_text())
    assert (result["completed"], result["failed"], result["errors"]) == (12, 0, [])
    assert (result["total_input_tokens"], result["total_output_tokens"]) == planned(12, 50.0)
    assert (sum(result["input_lens"]), sum(result["output_lens"])) == planned(12, 50.0)
    assert result["output_throughput"] * result["duration"] == pytest.approx(result["total_output_tokens"])
    assert result["max_concurrent_requests"] <= 2
    assert result["request_goodput"] == 0.0
    assert (result["model_id"], result["request_rate"], result["max_concurrency"]) == ("tiny", 50.0, 2)
    assert all(result[name] > 0 for name in MEANS)
    # A token that ends in the middle of a character comes with a later one.
    assert all(len(gaps) < length for gaps, length in zip(result["itls"], result["output_lens"], strict=True))
    assert [cost["pieces"] > 0 for cost in result["clients"]] == [True, True]
    assert picture.read_bytes().startswith(PNG)
    text = capfd.readouterr().out
    assert "Total generated tokens:                  " + str(result["total_output_tokens"]) in text
    assert "clients: 2, busiest" in text


def test_what_the_server_refuses_is_counted_and_told(server: Served, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["serve", "--url", f"http://127.0.0.1:{server.port}", "--vocab-size", str(2 * VOCAB), "--num-warmups", "0"]
    main([*arguments, "--num-prompts", "6", "--random-input-len", "1", "--random-output-len", "2", "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["completed"] > 0
    assert result["failed"] > 0
    assert result["completed"] + result["failed"] == 6
    assert "status 400" in result["errors"][0]
    assert f"{result['failed']} requests failed" in capfd.readouterr().out


def test_a_refused_warm_up_is_told(server: Served) -> None:
    arguments = ["serve", "--url", f"http://127.0.0.1:{server.port}", "--served-model-name", "other", "--vocab-size", str(VOCAB)]
    with pytest.raises(SystemExit, match=r"404: .*The model 'other' is not served"):
        main([*arguments, *LENGTHS])


def test_it_starts_a_server_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-P", "-m", "ep_runtime.bench", "serve", "--model", "tiny", "--device", "cpu", "--num-prompts", "5"]
    done = subprocess.run(
        [*command, *LENGTHS, "--out", str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert (result["total_input_tokens"], result["total_output_tokens"]) == planned(5, math.inf)
    assert result["request_rate"] == "inf"
    assert result["start_seconds"] > 0
    assert "ttfts" not in result


@pytest.mark.parametrize("flags", [["--goodput", "itl:3"], ["--request-rate", "0"], ["--random-range-ratio", "1"]])
def test_flags_that_make_no_sense_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--url", "http://127.0.0.1:9", *flags])


def test_a_tokenizer_shows_every_token_of_a_large_vocabulary(tmp_path: Path) -> None:
    size = CONFIGS["qwen3-30b-a3b"]["vocab_size"]
    tokenizer = Tokenizer.load(str(write_tokenizer(tmp_path / "tokenizer", size)))
    assert tokenizer.vocab_size == size
    assert tokenizer.decode([size - 1, 300]) == f" {size - 1} 300"


def test_clients_by_cores() -> None:
    assert [default_clients(cores) for cores in (1, 2, 16, 128)] == [1, 1, 4, 8]
