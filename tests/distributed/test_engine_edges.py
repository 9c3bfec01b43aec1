"""What hostile or unlucky requests may not do: end the engine, disturb the others, leak, or end without an answer."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.chaos_cases import random_request
from tests.distributed.test_greedy import check, mixed_requests
from tests.support.checkpoints import VOCAB, prompt
from tests.support.ranks import RankPool

CASES = "tests.distributed.edge_cases:"
CHAOS = "tests.distributed.chaos_cases:"
Checkpoint = Callable[[str, str], Path]
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}

BAD: dict[str, tuple[int, dict[str, Any]]] = {
    "prompt": (400, {"prompt": [5, VOCAB]}),
    "negative prompt": (400, {"prompt": [5, -1]}),
    "prompt is empty": (400, {"prompt": []}),
    "maximum context length": (400, {"prompt": [5] * 300}),
    "generated": (400, {"generated": [VOCAB]}),
    "logit_bias": (400, {"sampling": {"logit_bias": {VOCAB: 1.0}}}),
    "logit_bias: values": (400, {"sampling": {"logit_bias": {3: math.nan}}}),
    "stop_token_ids": (400, {"sampling": {"stop_token_ids": [VOCAB]}}),
    "temperature is nan": (400, {"sampling": {"temperature": math.nan}}),
    "temperature is -1": (400, {"sampling": {"temperature": -1.0}}),
    "top_p": (400, {"sampling": {"temperature": 1.0, "top_p": 0.0}}),
    "top_k": (400, {"sampling": {"temperature": 1.0, "top_k": -5}}),
    "min_p": (400, {"sampling": {"temperature": 1.0, "min_p": 2.0}}),
    "repetition_penalty is 0": (400, {"sampling": {"repetition_penalty": 0.0}}),
    "presence_penalty is inf": (400, {"sampling": {"presence_penalty": math.inf}}),
    "logprobs is -1": (400, {"sampling": {"logprobs": -1}}),
    "prompt_logprobs is -1": (400, {"prompt": [5, 6], "sampling": {"prompt_logprobs": -1}}),
    "max_tokens is -1": (400, {"sampling": {"max_tokens": -1}}),
    "min_tokens is -1": (400, {"sampling": {"min_tokens": -1}}),
    "grammar mask of 3 bytes": (400, {"sampling": {"grammar": True}, "mask": b"abc"}),
    "no token is allowed": (500, {"sampling": {"grammar": True}}),
    "adapter is 7": (500, {"adapter": 7}),
    "ALLOC cannot be sent": (500, {"adapter": -7}),
}


def test_what_no_frontend_should_send_fails_alone(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder = checkpoint("mixtral", "plain")
    bad = {name: fields for name, (_, fields) in BAD.items()}
    answers = ranks.run(2, CASES + "hostile", folder=str(folder), bad=bad, **SETTINGS)[0]
    check(folder, [{"prompt": [5, 6, 7], "max_tokens": 8}], [answers["good"]])
    for name, (status, _) in BAD.items():
        answer = answers[name]
        assert (answer["finish"], answer["status"], answer["terminal_events"], answer["tokens"]) == ("error", status, 1, [])
        assert name.removeprefix("negative ") in answer["error"]


def test_an_id_names_one_request_at_a_time(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder = checkpoint("mixtral", "plain")
    result = ranks.run(2, CASES + "ids_used_again", folder=str(folder), **SETTINGS)[0]
    assert [tuple(end) for end in result["ends"]] == [("again", "abort"), ("again", "length"), ("twice", "length")]
    assert len(result["tokens"]) == 8


def test_a_mask_that_is_none_ends_its_request_alone(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder = checkpoint("mixtral", "plain")
    for lookahead in (False, True):
        answers = ranks.run(2, CASES + "ragged_mask", folder=str(folder), lookahead=lookahead, **SETTINGS)[0]
        assert (answers["bad"]["finish"], answers["bad"]["terminal_events"], len(answers["bad"]["tokens"])) == ("error", 1, 1)
        assert "mask of 3 bytes" in answers["bad"]["error"]
        check(folder, [{"prompt": [5, 6, 7], "max_tokens": 8}], [answers["good"]])


def test_an_alloc_that_fails_after_its_vote_leaves_the_slot_empty(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder, requests = checkpoint("qwen3_next", "plain"), mixed_requests((4, 30, 8, 5, 6), 9)
    answers = ranks.run(2, CASES + "alloc_fails_in_execute", folder=str(folder), requests=requests, **SETTINGS)[0]
    assert (answers["1"]["finish"], answers["1"]["terminal_events"]) == ("error", 1)
    assert "no room, alike" in answers["1"]["error"]
    check(folder, [r for i, r in enumerate(requests) if i != 1], [answers[n] for n in ("0", "2", "3", "4")])


def test_a_poisoned_slot_takes_only_free_and_is_not_compared(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3_next", "plain")
    said, poisoned, good = ranks.run(2, CASES + "poisoned", folder=str(folder), **SETTINGS)[0]
    assert said[0] == f"preparing: EpCommandFailed: tokens from {VOCAB} to {VOCAB}, the vocabulary has {VOCAB}"
    assert said[1] == "ACTIVE"
    assert (said[2].endswith("half way"), said[3]) == (True, poisoned)
    assert "not ACTIVE" in said[4]
    check(folder, [{"prompt": [5, 6, 7], "max_tokens": 8}], [good])


def test_an_engine_that_ends_takes_no_more_requests(ranks: RankPool, checkpoint: Checkpoint) -> None:
    answers = ranks.run(2, CASES + "late_submission", folder=str(checkpoint("mixtral", "plain")), **SETTINGS)[0]
    assert answers.pop("runs")["finish"] == "abort"
    assert {(a["finish"], a["status"], a["terminal_events"]) for a in answers.values()} == {("error", 503, 1)}


def test_a_worker_that_is_lost_while_the_head_waits_for_a_mask_is_noticed(ranks: RankPool, checkpoint: Checkpoint) -> None:
    outcomes = ranks.outcomes(2, CASES + "lost_while_waiting", folder=str(checkpoint("mixtral", "plain")), grace=20.0, **SETTINGS)
    assert (outcomes[0].kind, outcomes[1].kind) == ("returned", "died")
    assert outcomes[0].value.startswith(("EpPeerGone", "EpRankFailed"))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_5_moe"])
def test_lengths_at_every_bound(ranks: RankPool, checkpoint: Checkpoint, family: str) -> None:
    folder = checkpoint(family, "plain")
    pairs = [(255, 1), (254, 2), (1, 255), (15, 1), (15, 2), (16, 1), (16, 17), (17, 16), (32, 1), (31, 2), (48, 0)]
    requests = [{"prompt": prompt(length, seed=length), "max_tokens": most} for length, most in pairs]
    settings = SETTINGS | {"num_blocks": 16, "max_num_batched_tokens": 37}
    result = ranks.run(
        3, "tests.distributed.engine_cases:generate", folder=str(folder), requests=requests, together=True, **settings
    )[0]
    check(folder, requests, result["answers"])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fewer_experts_than_ranks(ranks: RankPool, checkpoint: Checkpoint, world: int) -> None:
    folder, requests = checkpoint("mixtral", "few"), mixed_requests((1, 40, 8), 12)
    result = ranks.run(
        world, "tests.distributed.engine_cases:generate", folder=str(folder), requests=requests, together=True, **SETTINGS
    )[0]
    check(folder, requests, result["answers"])


def chaos_requests(seed: int, count: int) -> dict[str, dict[str, Any]]:
    """Requests by id; every fourth asks for three samples."""
    rng, requests = random.Random(seed), {}
    for number in range(count):
        request = random_request(rng, number)
        for sample in range(3 if rng.random() < 0.25 else 1):
            requests[f"{number}-{sample}"] = request | {"seed": request["seed"] + sample}
    return requests


@pytest.mark.parametrize(
    ("family", "seed", "lookahead", "troubles"),
    [
        ("mixtral", 30, True, (0.0, 0.0, 0.0)),
        ("qwen3_next", 21, False, (0.0, 0.0, 0.0)),
        ("mixtral", 14, True, (0.1, 0.07, 0.1)),
        ("qwen3_next", 17, True, (0.1, 0.07, 0.1)),
    ],
)
def test_no_company_and_no_trouble_changes_an_answer(
    ranks: RankPool, checkpoint: Checkpoint, family: str, seed: int, lookahead: bool, troubles: tuple[float, float, float]
) -> None:
    """n > 1, penalties, biases, stops, grammars, logprobs, prefix hits, preemptions, aborts, failed steps and ALLOCs at once."""
    folder, requests = str(checkpoint(family, "plain")), chaos_requests(seed, 12)
    aborts, forward_failures, alloc_failures = troubles
    own = {"max_model_len": 88, "max_num_seqs": 1, "max_num_batched_tokens": 128, "block_size": 8}
    alone = ranks.run(1, CHAOS + "alone", folder=folder, requests=requests, **own)[0]
    shared = {"max_num_seqs": 6, "max_num_batched_tokens": 19, "num_blocks": 11, "enable_prefix_caching": family == "mixtral"}
    result = ranks.run(
        3,
        CHAOS + "together",
        folder=folder,
        requests=requests,
        seed=seed,
        aborts=aborts,
        forward_failures=forward_failures,
        alloc_failures=alloc_failures,
        lookahead=lookahead,
        **own | shared,
    )[0]
    assert result["preemptions"] > 0 or any(troubles)
    for request_id, answer in result["answers"].items():
        expected = alone[request_id]
        assert answer["terminal_events"] == 1
        assert answer["tokens"] == expected["tokens"][: len(answer["tokens"])], request_id
        if answer["finish"] in ("stop", "length"):
            assert (answer["tokens"], answer["finish"]) == (expected["tokens"], expected["finish"]), request_id
            for field in ("logprobs", "prompt_logprobs"):
                assert answer[field] == pytest.approx(expected[field], abs=1e-4), request_id
        else:
            assert any(troubles)
