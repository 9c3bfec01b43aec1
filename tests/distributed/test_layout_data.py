"""The attention layout `data` on real ranks: each keeps some of the sequences, whatever else they do together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_greedy import check, mixed_requests
from tests.support.checkpoints import hf_logits, prompt
from tests.support.engine_fleet import Fleet, Request, settings_of
from tests.support.greedy import Judged, judge_greedy
from tests.support.ranks import RankPool
from tests.support.vision_checkpoints import make_vision_checkpoint
from tests.support.vision_greedy import judge_vision, request_of, trimmed, with_aliases
from tests.support.vision_prompts import Picture, Video, vision_prompt
from tests.support.wide import wide_folder

GENERATE = "tests.distributed.engine_cases:generate"
DATA: dict[str, Any] = {"attention_layout": "data"}
SIZES: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 47, "max_model_len": 256}
Checkpoint = Callable[[str, str], Path]


@pytest.mark.parametrize(
    ("family", "variant", "world"),
    [
        ("mixtral", "plain", 2),
        ("mixtral", "plain", 3),
        ("qwen3_moe", "plain", 2),
        ("qwen3_next", "plain", 2),
        ("qwen3_next", "plain", 3),
        ("qwen3_5_moe", "plain", 2),
        ("qwen3_5_moe", "plain", 3),
        ("llama", "bias", 2),
    ],
)
def test_mixed_batches_in_odd_chunks(ranks: RankPool, checkpoint: Checkpoint, family: str, variant: str, world: int) -> None:
    """Heads that no number of ranks divides; a bias behind the attention is added once."""
    folder, requests = checkpoint(family, variant), mixed_requests((1, 2, 63, 64, 65, 130), 13)
    result = ranks.run(world, GENERATE, folder=str(folder), requests=requests, together=True, **DATA, **SIZES)[0]
    assert check(folder, requests, result["answers"]).ties == 0


def test_a_rehearsal_leaves_nothing_behind(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder, requests = checkpoint("qwen3_next", "plain"), mixed_requests((4, 30, 90), 6)
    case = "tests.distributed.engine_cases:generate_rehearsed"
    head, other = ranks.run(2, case, folder=str(folder), requests=requests, **DATA, **SIZES)
    assert list(head[:2]) == list(other) == [False, True]
    check(folder, requests, head[2])


@pytest.mark.parametrize("world", [1, 4])
def test_worlds_of_one_rank_and_of_ranks_without_slots(ranks: RankPool, checkpoint: Checkpoint, world: int) -> None:
    folder, requests = checkpoint("qwen3_next", "plain"), mixed_requests((30, 2, 9), 9)
    sizes = SIZES | {"max_num_seqs": 2}
    result = ranks.run(world, GENERATE, folder=str(folder), requests=requests, together=True, **DATA, **sizes)[0]
    check(folder, requests, result["answers"])


def test_logprobs_are_the_models_own(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder, ids = checkpoint("qwen3_5_moe", "plain"), prompt(70)
    request = {"prompt": ids, "max_tokens": 5, "logprobs": 3, "prompt_logprobs": 2}
    result = ranks.run(2, GENERATE, folder=str(folder), requests=[request] * 2, together=True, **DATA, **SIZES)[0]
    for answer in result["answers"]:
        values = hf_logits(folder, ids + answer["tokens"]).log_softmax(-1)
        expected = [values[place, token].item() for place, token in enumerate((ids + answer["tokens"])[1:])]
        assert answer["prompt_logprobs"] == pytest.approx(expected[: len(ids) - 1], abs=1e-4)
        assert answer["logprobs"] == pytest.approx(expected[len(ids) - 1 :], abs=1e-4)


@pytest.mark.parametrize(("family", "lookahead"), [("mixtral", False), ("qwen3_next", True)])
def test_preempted_sequences_go_on(ranks: RankPool, checkpoint: Checkpoint, family: str, lookahead: bool) -> None:
    """Each rank has the blocks of one longest sequence, and more sequences than these hold."""
    folder, requests = checkpoint(family, "plain"), mixed_requests((1, 2, 63, 64, 65, 40, 66, 50, 3), 40)
    sizes = {"max_model_len": 232, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 29, "block_size": 8}
    run = {"folder": str(folder), "requests": requests, "together": True, "lookahead": lookahead}
    result = ranks.run(2, GENERATE, **run, **DATA, **sizes)[0]
    assert result["preemptions"] > 0
    check(folder, requests, result["answers"])


def test_twice_the_blocks_of_one_rank_are_used_at_once(ranks: RankPool, checkpoint: Checkpoint) -> None:
    """Four sequences that fill the blocks of two ranks run side by side; where each rank keeps all of them, two have to go."""
    folder, requests = checkpoint("qwen3_moe", "plain"), [{"prompt": prompt(50, seed=n), "max_tokens": 60} for n in range(4)]
    sizes = {"max_model_len": 120, "max_num_seqs": 4, "max_num_batched_tokens": 256, "num_blocks": 29, "block_size": 8}
    run = {"folder": str(folder), "requests": requests, "together": True}
    data, replicated = (ranks.run(2, GENERATE, **run, **sizes, attention_layout=layout)[0] for layout in ("data", "replicated"))
    assert (data["preemptions"], replicated["preemptions"] > 0) == (0, True)
    assert data["steps"] < replicated["steps"]
    check(folder, requests, data["answers"])


def test_prefix_hits_change_no_token(ranks: RankPool, checkpoint: Checkpoint) -> None:
    """One after the other they all go to the rank that knows their beginning; at once some compute it anew elsewhere."""
    folder = checkpoint("qwen3_moe", "plain")
    common = prompt(50, seed=3)
    requests = [{"prompt": common + prompt(5 + i, seed=i), "max_tokens": 10} for i in range(6)]
    run = {"folder": str(folder), "requests": requests, **DATA, **SIZES, "enable_prefix_caching": True}
    for together in (False, True):
        answers = ranks.run(3, GENERATE, together=together, **run)[0]["answers"]
        assert together or [answer["cached"] for answer in answers] == [0, 48, 48, 48, 48, 48]
        check(folder, requests, answers)


def test_samples_of_one_prompt_stay_with_it_or_compute_it_anew(ranks: RankPool, checkpoint: Checkpoint) -> None:
    """More samples than one rank has slots."""
    folder = checkpoint("mixtral", "plain")
    requests = [{"prompt": prompt(70, seed=4), "max_tokens": 12 + n, "group": "n"} for n in range(6)]
    run = {"folder": str(folder), "requests": requests, "together": True, "enable_prefix_caching": True, **DATA, **SIZES}
    answers = ranks.run(2, GENERATE, **run)[0]["answers"]
    cached = [answer["cached"] for answer in answers]
    assert sorted(cached) == [0, 0, 64, 64, 64, 64]
    check(folder, requests, answers)


def test_aborts_at_any_moment_leave_the_others_right(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder, requests = checkpoint("qwen3_5_moe", "plain"), mixed_requests((4, 90, 8, 70, 3), 12)
    aborts = {"0": 3, "1": 0, "3": 1}
    run = {"folder": str(folder), "requests": requests, "aborts": aborts, "lookahead": True}
    answers = ranks.run(2, "tests.distributed.engine_cases:abort_some", **run, **DATA, **SIZES)[0]
    for number in aborts:
        assert (answers[int(number)]["finish"], answers[int(number)]["terminal_events"]) == ("abort", 1)
    check(folder, [requests[2], requests[4]], [answers[2], answers[4]])


@pytest.mark.parametrize(("section", "noticed"), [("blocks", True), ("outputs", True), ("h", False)])
def test_what_a_digest_finds(ranks: RankPool, checkpoint: Checkpoint, section: str, noticed: bool) -> None:
    """A state is on one rank alone: nothing can be set beside it. What all ranks have after the layers can."""
    case, sizes = (
        "tests.distributed.divergence_cases:diverge",
        {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64},
    )
    folder = str(checkpoint("qwen3_next", "plain"))
    error, _ = ranks.run(2, case, folder=folder, section=section, rank=1, **DATA, **sizes)[0]
    if noticed:
        assert error.startswith("EpDiverged: ranks differ in digests of step")
        assert f"; {section}: " in error
        assert "; h: " not in error
    else:
        assert error == "nothing was noticed"


def test_no_admitted_step_takes_more_than_its_line_of_the_plan(ranks: RankPool, tmp_path: Path) -> None:
    folder = wide_folder("hybrid", tmp_path / "model", vocab_size=500)
    sizes = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 1024, "dtype": "float32"}
    for peak, planned in ranks.run(2, "tests.distributed.memory_cases:largest_step", folder=str(folder), **DATA, **sizes):
        assert peak <= planned < 8 * peak


def test_answers_to_images_equal_transformers(ranks: RankPool, tmp_path: Path) -> None:
    """Rows of images are everywhere, their three-part positions where their sequence is."""
    folder = with_aliases(make_vision_checkpoint("qwen3_5_moe", tmp_path / "vision"), tmp_path / "aliases")
    prompts = {
        "text": vision_prompt(7, seed=1),
        "three": vision_prompt(1, Picture(5, 4, seed=1), 3, Picture(1, 2, seed=2), Picture(2, 4, seed=3), 4, seed=3),
        "last": trimmed(vision_prompt(11, Picture(2, 4, seed=5), seed=5), back=1),
        "video": vision_prompt(2, Video(2, 3, groups=3, seed=7), 3, Picture(2, 3, seed=8), 2, seed=7),
    }
    requests = {label: request_of(one, 6, logprobs=0) for label, one in prompts.items()}
    sizes = {"max_model_len": 96, "max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 4, "digest_interval": 1}
    case = "tests.distributed.engine_images_cases:serve"
    record = ranks.run(2, case, folder=str(folder), requests=requests, **DATA, **sizes)[0]
    for label, answer in record["answers"].items():
        judge_vision(folder, prompts[label], answer)


def test_every_request_survives_killed_ranks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """First a worker is killed and then the head, with the states of its own sequences: all are computed anew where they fit."""
    folder, length = checkpoint("qwen3_next", "plain"), 40
    config = settings_of(folder, 2, num_blocks=600, command_timeout=30.0, **DATA)
    asked = [prompt(n, seed=7) for n in (3, 17, 30, 64)]
    with closing(Fleet(tmp_path, config, 2)) as fleet:
        fleet.stand_by([0, 1])
        fleet.load()
        fleet.begin()
        requests = {str(number): Request(ids, length) for number, ids in enumerate(asked)}
        fleet.frontend.submit(requests)
        for killed, most in ((1, 10), (0, 25)):
            while not any(most <= len(request.tokens) < length for request in requests.values()):
                fleet.frontend.pump()
            fleet.engines[killed].kill()
            fleet.end()
            assert fleet.replace_dead() == [killed]
            fleet.begin()
            fleet.frontend.replay()
        fleet.frontend.finish()
        assert set(fleet.end()) == {0, 1}
    judged = Judged()
    for ids, request in zip(asked, requests.values(), strict=True):
        assert (request.finish, request.error, len(request.tokens)) == ("length", None, length)
        judge_greedy(folder, ids, request.tokens, judged)
