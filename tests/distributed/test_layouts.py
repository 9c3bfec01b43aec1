"""The attention layout `tensor` on real ranks: right tokens in every company and after a replay, and what a DIGEST still finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_greedy import check, mixed_requests
from tests.support.checkpoints import hf_logits, prompt
from tests.support.ranks import RankPool, RanksFailed
from tests.support.vision_checkpoints import make_vision_checkpoint
from tests.support.wide import wide_folder

GENERATE = "tests.distributed.engine_cases:generate"
TENSOR: dict[str, Any] = {"attention_layout": "tensor"}
SIZES: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 47, "max_model_len": 256}
FAMILIES = ("llama", "mixtral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
Checkpoint = Callable[[str, str], Path]


@pytest.mark.parametrize(("family", "world"), [*((family, 2) for family in FAMILIES), ("qwen3_next", 4)])
def test_mixed_batches_in_odd_chunks(ranks: RankPool, checkpoint: Checkpoint, family: str, world: int) -> None:
    folder, requests = checkpoint(family, "heads"), mixed_requests((1, 2, 63, 64, 65, 130), 13)
    result = ranks.run(world, GENERATE, folder=str(folder), requests=requests, together=True, **TENSOR, **SIZES)[0]
    assert check(folder, requests, result["answers"]).ties == 0


def test_logprobs_are_the_models_own(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder, ids = checkpoint("qwen3_5_moe", "heads"), prompt(70)
    request = {"prompt": ids, "max_tokens": 5, "logprobs": 3, "prompt_logprobs": 2}
    result = ranks.run(4, GENERATE, folder=str(folder), requests=[request], together=True, **TENSOR, **SIZES)[0]
    answer = result["answers"][0]
    values = hf_logits(folder, ids + answer["tokens"]).log_softmax(-1)
    expected = [values[place, token].item() for place, token in enumerate((ids + answer["tokens"])[1:])]
    assert answer["prompt_logprobs"] == pytest.approx(expected[: len(ids) - 1], abs=1e-4)
    assert answer["logprobs"] == pytest.approx(expected[len(ids) - 1 :], abs=1e-4)


@pytest.mark.parametrize("lookahead", [False, True], ids=["results-first", "planned-ahead"])
def test_preempted_sequences_go_on(ranks: RankPool, checkpoint: Checkpoint, lookahead: bool) -> None:
    folder, requests = checkpoint("qwen3_next", "heads"), mixed_requests((1, 2, 63, 64, 65), 40)
    sizes = {"max_model_len": 232, "max_num_seqs": 5, "max_num_batched_tokens": 64, "num_blocks": 29, "block_size": 8}
    run = {"folder": str(folder), "requests": requests, "together": True, "lookahead": lookahead}
    result = ranks.run(2, GENERATE, **run, **TENSOR, **sizes)[0]
    assert result["preemptions"] > 0
    check(folder, requests, result["answers"])


def test_requests_are_replayed_in_a_new_epoch(ranks: RankPool, checkpoint: Checkpoint) -> None:
    """The first epoch is left in the middle of the answers; the next one computes prompts and answers so far anew."""
    case = "tests.distributed.replay_cases:epoch"
    folder, length = checkpoint("qwen3_next", "heads"), 20
    asked = {str(n): {"prompt": prompt(10 + 20 * n, seed=n), "max_tokens": length, "seed": 0, "ignore_eos": True} for n in range(3)}
    run = {"folder": str(folder), "requests": asked, "suspicions": 0, **TENSOR, **SIZES}
    cut = ranks.run(2, case, generated={}, turns=12, **run)[0]
    begun = {name: answer["tokens"] for name, answer in cut.items()}
    assert all(0 < len(tokens) < length for tokens in begun.values())
    after = ranks.run(2, case, generated=begun, turns=0, **run)[0]
    answers = [{**after[name], "terminal_events": 1} for name in asked]
    assert all(after[name]["tokens"][: len(begun[name])] == begun[name] for name in asked)
    check(folder, [{"prompt": one["prompt"], "max_tokens": length} for one in asked.values()], answers)


@pytest.mark.parametrize(("section", "noticed"), [("lengths", True), ("routing", True), ("outputs", True), ("h", False)])
def test_what_a_digest_finds(ranks: RankPool, checkpoint: Checkpoint, section: str, noticed: bool) -> None:
    """A rank's own part of a recurrent state has no like: nothing can be set beside it."""
    case, sizes = (
        "tests.distributed.divergence_cases:diverge",
        {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64},
    )
    folder = str(checkpoint("qwen3_next", "heads"))
    error, _ = ranks.run(2, case, folder=folder, section=section, rank=1, **TENSOR, **sizes)[0]
    if noticed:
        assert error.startswith("EpDiverged: ranks differ in digests of step")
        assert f"; {section}: " in error
        assert "; h: " not in error
    else:
        assert error == "nothing was noticed"


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_no_admitted_step_takes_more_than_its_line_of_the_plan(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    folder = wide_folder(kind, tmp_path / "model", vocab_size=500)
    sizes = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 1024, "dtype": "float32"}
    for peak, planned in ranks.run(2, "tests.distributed.memory_cases:largest_step", folder=str(folder), **TENSOR, **sizes):
        assert peak <= planned < 8 * peak


def test_images_enter_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    """The rows that enter layer 0 are those of one rank, whatever the layout."""
    folder = make_vision_checkpoint("qwen3_vl_moe", tmp_path / "vision")
    sizes = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 64, "digest_interval": 0}
    case = "tests.distributed.vision_cases:embeds"
    run = {"folder": str(folder), "chunks": [2, 7, 12, 20, 29, 32], **sizes}
    assert ranks.run(2, case, **run, **TENSOR)[0] == ranks.run(1, case, **run)[0]


def test_every_rank_refuses_heads_that_do_not_divide(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder = str(checkpoint("qwen3_5", "plain"))
    with pytest.raises(RanksFailed, match="num_attention_heads is 3") as refused:
        ranks.run(2, GENERATE, folder=folder, requests=[], together=True, **TENSOR, **SIZES)
    assert [outcome.kind for outcome in refused.value.outcomes] == ["raised", "raised"]
    result = ranks.run(2, GENERATE, folder=folder, requests=[], together=True, attention_layout="auto", **SIZES)[0]
    assert result["answers"] == []
