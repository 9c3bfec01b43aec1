"""One rank of several, measured alone: its steps on the CPU, what they choose, and what the cost model says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ep_runtime.bench.__main__ import main
from ep_runtime.bench.cost import Case, decode_step
from ep_runtime.bench.cost_models import model_costs
from ep_runtime.bench.cost_shares import check_shares
from ep_runtime.bench.share_steps import WARM_STEPS, count_choices, step_times
from ep_runtime.bench.tiny import EXPERT, HEAD, HIDDEN, KV_HEADS, LAYERS, VOCAB
from model.batch import ForwardOutput
from tests.support.cost_machine import PLAIN

FLAGS = ["--models", "tiny", "--ranks", "2", "--batch", "1,4", "--context", "20", "--prompts", "2", "--prompt-len", "24"]
FLAGS += ["--steps", "6", "--prompt-steps", "2", "--device", "cpu", "--threads", "1"]


def test_a_rank_of_two_on_the_cpu_is_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    flags = ["share", *FLAGS, "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "ep_runtime.bench", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(out.read_text())
    assert [(part["attention_layout"], part["ranks"], part["rank"]) for part in result["parts"]] == [
        ("tensor", 2, 0),
        ("replicated", 2, 0),
    ]
    for part in result["parts"]:
        assert [row["batch"] for row in part["decode"]] == [1, 4]
        assert (part["prompts"]["rows"], part["prompts"]["hits"]) == (48, 4)  # so many rows hit each of its experts
        for row in (*part["decode"], part["prompts"]):
            assert row["step_ms"] > 0
            assert 0.2 < row["held_share"] < 0.8
        for row in part["decode"]:
            # Bytes by hand, in float32: half of the vocabulary, and of the experts those that were hit.
            assert row["bytes"]["head"] == VOCAB // 2 * HIDDEN * 4
            assert row["bytes"]["experts"] == round(row["hits"] * LAYERS * 3 * EXPERT * HIDDEN * 4)
            assert len(row["intervals_ms"]) == 6
    tensor, everywhere = result["parts"]
    cache = 4 * 20 * LAYERS * 2 * HEAD * KV_HEADS * 4
    assert (tensor["decode"][1]["bytes"]["cache"], everywhere["decode"][1]["bytes"]["cache"]) == (cache // 2, cache)
    assert tensor["weight_bytes"] < everywhere["weight_bytes"]
    assert done.stdout.count("rank 0 of 2") == 2
    main(flags)
    assert "rank 0 of 2" not in capsys.readouterr().out
    assert json.loads(out.read_text()) == result


def test_choices_are_counted_by_layer() -> None:
    # Two layers, two rows, two choices: of the held experts 0 and 1, layer 0 hits both, layer 1 none.
    routing = torch.tensor([[[0, 3], [1, 0]], [[2, 3], [3, 2]]], dtype=torch.int32)
    ran: list[list[int]] = []

    def step(tokens: list[int]) -> ForwardOutput:
        ran.append(tokens)
        return ForwardOutput(logits=None, routing=routing, outputs=torch.full((2, 1), float(tokens[0])))

    assert count_choices(step, [[1, 2], [3, 4]], [0, 1]) == (1.0, 3 / 8)
    assert ran == [[1, 2], [3, 4]]
    with pytest.raises(RuntimeError, match="finite"):
        count_choices(step, [[np.inf, 0]], [0])  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="routes"):
        count_choices(lambda _: ForwardOutput(logits=None, outputs=torch.zeros(1)), [[0]], [0])


def test_the_first_steps_are_not_timed() -> None:
    ran: list[list[int]] = []

    def step(tokens: list[int]) -> ForwardOutput:
        ran.append(tokens)
        return ForwardOutput(logits=None)

    tokens = [[number] for number in range(WARM_STEPS + 1 + 3)]
    assert len(step_times(step, tokens, torch.device("cpu"))) == 3
    assert ran == tokens


def test_predictions_leave_collectives_out_and_take_what_was_hit() -> None:
    model = model_costs("qwen3-30b-a3b")
    decoded = {"batch": 8, "context": 160, "hits": 2.0, "step_ms": 4.0, "floor_ms": 1.0}
    prompts = {"rows": 1000, "prompt_len": 500, "step_ms": 20.0}
    part: dict[str, Any] = {"model": model.name, "attention_layout": "replicated", "ranks": 8, "device": "X"}
    part |= {"bandwidth_gb_s": 2000.0, "decode": [decoded], "prompts": prompts}
    row, prompt = check_shares(PLAIN, {model.name: model}, {"parts": [part]})
    # At 2 TB/s: two experts of each layer, an eighth of the head, all else, and keys and values of eight times 160 positions.
    moved = 48 * 2 * model.expert + 151936 // 8 * 4096 + model.dense + 8 * 160 * 48 * 2 * 4 * 128 * 2
    assert row["predicted_ms"] == pytest.approx(moved / 2e9 + 48 * (10 + 3 + 8 * 0.5) / 1e3)
    assert row["off"] == pytest.approx(row["predicted_ms"] / 4.0 - 1)
    attention = 4 * 48 * 32 * 128 * 500 / 2
    # 62.5 rows an expert, of 16 experts: each has a block of 128 that is not full.
    operations = 1000 * (model.dense + attention) + 48 * model.expert * 16 * 128
    assert prompt["predicted_ms"] == pytest.approx(10 + 1e3 * operations / 1e14)
    whole = decode_step(PLAIN, model, Case(batch=8, per_host=8, hits=2.0))
    assert row["predicted_ms"] == pytest.approx(
        decode_step(replace(PLAIN, bandwidth=2e12), model, Case(batch=8, per_host=8, hits=2.0, alone=True)).total
    )
    assert whole.collectives > 0
    for other in (part | {"device": "Y"}, part | {"model": "unknown"}):
        assert all("predicted_ms" not in row for row in check_shares(PLAIN, {model.name: model}, {"parts": [other]}))
