"""A Trellis folder on real ranks: at one loop, tokens are the library's, and not a bit depends on the number of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model.trellis import ModelSettings, load_checkpoint, save_checkpoint
from model.trellis.checkpoint import config_to_json
from tests.distributed.test_memory import STEPS
from tests.support.ranks import RankPool
from tests.unit.trellis.trellis_cases import NANO, greedy, make

LARGEST_STEP = "tests.distributed.memory_cases:largest_step"
GENERATE = "tests.distributed.engine_cases:generate"
SETTINGS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 29, "num_blocks": 64}
LONGER = replace(NANO, context=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trellis")
    save_checkpoint(make(LONGER), path)
    return path


def requests() -> list[dict[str, Any]]:
    """Prompts of one row, around the window and over several pieces; more of them than slots."""
    generator = torch.Generator().manual_seed(4)
    lengths = (1, 7, 9, 30, 61, 2)
    return [
        {"prompt": torch.randint(256, (length,), generator=generator).tolist(), "max_tokens": 21 - place, "logprobs": 2}
        for place, length in enumerate(lengths)
    ]


def test_tokens_are_the_librarys_and_every_world_gives_the_same_bits(ranks: RankPool, folder: Path) -> None:
    model = load_checkpoint(folder, ModelSettings(bank_shard_mode="fixed"), aux=False)
    answers = {
        world: ranks.run(world, GENERATE, folder=str(folder), requests=requests(), together=True, **SETTINGS)[0]["answers"]
        for world in (1, 2, 4)
    }
    for request, answer in zip(requests(), answers[1], strict=True):
        tokens, logprobs = greedy(model, request["prompt"], request["max_tokens"])
        assert (answer["finish"], answer["error"], answer["tokens"]) == ("length", None, tokens)
        assert answer["logprobs"] == pytest.approx(logprobs, abs=1e-4)
    for world in (2, 4):
        for one, other in zip(answers[1], answers[world], strict=True):
            assert (one["tokens"], one["logprobs"]) == (other["tokens"], other["logprobs"])


def test_a_rehearsal_leaves_nothing_behind(ranks: RankPool, folder: Path) -> None:
    case = "tests.distributed.engine_cases:generate_rehearsed"
    plain = ranks.run(2, GENERATE, folder=str(folder), requests=requests(), together=True, **SETTINGS)[0]["answers"]
    head, other = ranks.run(2, case, folder=str(folder), requests=requests(), **SETTINGS)
    assert list(head[:2]) == list(other) == [False, True]
    assert [answer["tokens"] for answer in head[2]] == [answer["tokens"] for answer in plain]


WIDE = {
    "logits": (replace(NANO, context=4096, vocab_size=50_000), STEPS["logits"]),
    "rows": (replace(NANO, context=4096, window=512, d_model=256, mlp_dim=1024, gdn_key_dim=64, gdn_value_dim=64), STEPS["rows"]),
    "few rows": (
        replace(NANO, context=4096, window=256, d_model=256, mlp_dim=1024, gdn_key_dim=64, gdn_value_dim=64),
        STEPS["few rows"],
    ),
    "bank": (replace(NANO, context=4096, bank_sub_keys=256, bank_value_dim=256, bank_top_k=32), STEPS["rows"]),
}


@pytest.mark.parametrize(
    ("wide", "dtype", "world", "loops"),
    [("logits", "float32", 1, 1), ("few rows", "bfloat16", 2, 1), ("rows", "float32", 1, 4), ("bank", "float32", 2, 4)],
)
def test_no_admitted_step_takes_more_than_its_line_of_the_plan(
    ranks: RankPool, tmp_path: Path, wide: str, dtype: str, world: int, loops: int
) -> None:
    """As for other models, and with every loop."""
    config, step = WIDE[wide]
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(config)))
    for peak, planned in ranks.run(world, LARGEST_STEP, folder=str(tmp_path), dtype=dtype, loops=loops, **step):
        assert peak <= planned
        assert planned < 8 * peak
