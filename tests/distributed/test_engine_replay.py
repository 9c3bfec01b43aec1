"""Requests that an epoch's end interrupts go on in the next as if nothing had happened: tokens, log-probabilities, ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_greedy import check
from tests.support.checkpoints import VOCAB, prompt
from tests.support.ranks import RankPool

CASE = "tests.distributed.replay_cases:epoch"
Checkpoint = Callable[[str, str], Path]
SETTINGS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 23, "num_blocks": 14, "block_size": 8}

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": prompt(9), "max_tokens": 20, "seed": 0, "ignore_eos": True, "logprobs": 2},
    "seeded": {"prompt": prompt(16, seed=1), "max_tokens": 20, "seed": 11, "temperature": 1.0, "top_p": 0.9, "logprobs": 0},
    "penalties": {
        "prompt": prompt(12, seed=2),
        "max_tokens": 24,
        "seed": 12,
        "temperature": 1.3,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.6,
        "ignore_eos": True,
        "logprobs": 3,
    },
    "greedy penalties": {
        "prompt": prompt(5, seed=3),
        "max_tokens": 20,
        "seed": 0,
        "repetition_penalty": 1.5,
        "frequency_penalty": 1.0,
        "ignore_eos": True,
        "logprobs": 0,
    },
    "bias": {
        "prompt": prompt(7, seed=4),
        "max_tokens": 20,
        "seed": 13,
        "temperature": 0.8,
        "top_k": 12,
        "min_p": 0.02,
        "logit_bias": {5: 4.0, 9: -100.0},
        "ignore_eos": True,
        "logprobs": 1,
    },
    "stops": {
        "prompt": prompt(8, seed=5),
        "max_tokens": 40,
        "seed": 14,
        "temperature": 1.5,
        "min_tokens": 9,
        "stop_token_ids": list(range(0, VOCAB, 3)),
        "logprobs": 0,
    },
    "grammar": {
        "prompt": prompt(10, seed=6),
        "max_tokens": 12,
        "seed": 15,
        "temperature": 1.0,
        "grammar": True,
        "ignore_eos": True,
        "logprobs": 1,
    },
    "scored": {"prompt": prompt(60, seed=7), "max_tokens": 6, "seed": 0, "prompt_logprobs": 1, "ignore_eos": True, "logprobs": 0},
    "whole context": {"prompt": prompt(56, seed=8), "max_tokens": 40, "seed": 0, "ignore_eos": True, "logprobs": 0},
}


@pytest.mark.parametrize(
    ("family", "cuts", "suspicions"),
    [("mixtral", (9, 17), 0), ("qwen3_next", (25,), 0), ("qwen3_moe", (12, 20, 9), 2)],
)
def test_replayed_requests_go_on_as_if_undisturbed(
    ranks: RankPool, checkpoint: Checkpoint, family: str, cuts: tuple[int, ...], suspicions: int
) -> None:
    folder = str(checkpoint(family, "plain"))
    whole = ranks.run(2, CASE, folder=folder, requests=REQUESTS, generated={}, suspicions=0, turns=0, **SETTINGS)[0]
    assert {answer["finish"] for answer in whole.values()} <= {"stop", "length"}
    assert whole["stops"]["finish"] == "stop"
    seen = {name: {"tokens": [], "logprobs": [], "finish": None} for name in REQUESTS}
    for epoch, turns in enumerate((*cuts, 0)):
        left = {name: request for name, request in REQUESTS.items() if seen[name]["finish"] is None}
        answers = ranks.run(
            2,
            CASE,
            folder=folder,
            requests=left,
            generated={name: seen[name]["tokens"] for name in left},
            suspicions=suspicions if epoch else 0,
            turns=turns,
            **SETTINGS,
        )[0]
        assert epoch == 0 or any(seen[name]["tokens"] for name in left), "nothing was interrupted in the middle of its answer"
        for name, answer in answers.items():
            assert answer["terminal_events"] <= 1
            expected = whole[name]["prompt_logprobs"]
            begun = [] if seen[name]["tokens"] else expected[: len(answer["prompt_logprobs"])]
            assert answer["prompt_logprobs"] == pytest.approx(begun, abs=1e-5), (
                "sent once a token is there, or from the start again"
            )
            seen[name]["logprobs"] += answer["logprobs"]
            seen[name] |= {"tokens": answer["tokens"], "finish": answer["finish"] if answer["finish"] != "abort" else None}
    for name, answer in whole.items():
        assert seen[name]["tokens"] == answer["tokens"], name
        assert seen[name]["finish"] == answer["finish"], name
        assert seen[name]["logprobs"] == pytest.approx(answer["logprobs"], abs=1e-5), name


@pytest.mark.parametrize("budget", [16, 17, 23])
def test_a_replay_is_sampled_behind_its_last_piece_alone(ranks: RankPool, checkpoint: Checkpoint, budget: int) -> None:
    """Pieces end at the prompt's end, behind it, and with the last known token, beside rows that are sampled in the same step."""
    folder, asked = checkpoint("qwen3_next", "plain"), [{"prompt": prompt(16, seed=n), "max_tokens": 24} for n in range(3)]
    requests = {str(number): {**request, "seed": 0, "ignore_eos": True} for number, request in enumerate(asked)}
    run = {"folder": str(folder), "requests": requests, "suspicions": 0, "turns": 0}
    settings = SETTINGS | {"max_num_batched_tokens": budget, "num_blocks": 18}
    whole = ranks.run(3, CASE, generated={}, **run, **settings)[0]
    known = {name: answer["tokens"][: 9 + int(name)] for name, answer in whole.items()}
    for answers in (whole, ranks.run(3, CASE, generated=known, **run, **settings)[0]):
        check(folder, asked, [answers[name] for name in requests])
