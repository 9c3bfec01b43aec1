"""Trellis on GPUs: tokens in float32 are the library's on the CPU, at one loop and at all of them, on one device and on two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model.trellis import ModelSettings, load_checkpoint, save_checkpoint
from tests.support.ranks import RankPool
from tests.unit.trellis.trellis_cases import WIDE, greedy, make

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

GENERATE = "tests.distributed.engine_cases:generate"
SETTINGS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 70,
    "num_blocks": 64,
    "dtype": "float32",
}
CONFIG = replace(WIDE, context=128, d_model=256, mlp_dim=512, heads=4, gdn_heads=4, window=24)
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trellis")
    save_checkpoint(make(CONFIG), path)
    return path


def prompts() -> list[list[int]]:
    """Of one row, around the window and over several pieces; more of them than slots."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(CONFIG.vocab_size, (length,), generator=generator).tolist() for length in (1, 7, 24, 30, 61, 2)]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=two_devices)])
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("loops", [1, 4])
def test_float32_tokens_are_the_librarys(ranks: RankPool, folder: Path, world: int, mode: str, loops: int) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    model = load_checkpoint(folder, ModelSettings(bank_shard_mode="fixed"), aux=False)
    kind: dict[str, Any] = {"max_tokens": NEW_TOKENS, "logprobs": 0} | ({} if loops == 1 else {"loops": [loops, []]})
    requests = [{"prompt": prompt, **kind} for prompt in prompts()]
    where = {"folder": str(folder), "device": DEVICE, "forward_mode": mode}
    answers = ranks.run(world, GENERATE, requests=requests, together=True, deadline=300.0, **where, **SETTINGS)[0]["answers"]
    for request, answer in zip(requests, answers, strict=True):
        tokens, logprobs = greedy(model, request["prompt"], NEW_TOKENS, loops)
        assert (answer["finish"], answer["error"], answer["tokens"]) == ("length", None, tokens)
        assert answer["logprobs"] == pytest.approx(logprobs, abs=1e-3)
