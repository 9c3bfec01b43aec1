"""A real engine at its bounds: lengths, full queues, abort storms. Nothing leaks, and nobody is left without an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import prompt
from tests.support.greedy import Judged, judge_greedy
from tests.support.ranks import RankPool

CASES = "tests.distributed.engine_overload_cases:"
Checkpoint = Callable[[str, str], Path]
BLOCK = 16


def at_bounds(limit: int, budget: int) -> dict[str, tuple[int, dict[str, Any]]]:
    """Requests one under, at and one over each bound, with each one's status; `limit` of positions, `budget` of a step."""
    lengths = {
        "whole but one": (limit - 1, 1),
        "whole": (limit - 2, 2),
        "one under": (limit - 2, 1),
        "one over": (limit, 1),
        "one token over": (limit - 1, 2),
        "no tokens, at": (limit, 0),
        "no tokens, over": (limit + 1, 0),
        "prompt alone over": (limit + 1, 1),
        "long answer": (1, limit - 1),
        "long answer, over": (1, limit),
        "budget under": (budget - 1, 3),
        "budget at": (budget, 3),
        "budget over": (budget + 1, 3),
        "twice the budget": (2 * budget, 3),
        "block under": (BLOCK - 1, 2),
        "block at": (BLOCK, 1),
        "block over": (BLOCK + 1, BLOCK),
        "empty": (0, 1),
    }
    found = {}
    for name, (length, most) in lengths.items():
        status = 200 if length > 0 and length + most <= limit else 400
        found[name] = (status, {"prompt": prompt(length, seed=length) if length else [], "max_tokens": most})
    return found


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
@pytest.mark.parametrize(
    ("world", "limit", "blocks"),
    [(1, 100, None), (2, 100, 7), (2, 96, 6)],
    ids=["memory decides", "blocks just hold one", "limit is whole blocks"],
)
def test_one_under_at_and_one_over_every_bound(
    ranks: RankPool, checkpoint: Checkpoint, family: str, world: int, limit: int, blocks: int | None
) -> None:
    folder, requests = checkpoint(family, "plain"), at_bounds(limit, 24)
    settings: dict[str, Any] = {
        "max_model_len": limit,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "block_size": BLOCK,
        "num_blocks": blocks,
    }
    sent = {name: request for name, (_, request) in requests.items()}
    result = ranks.run(world, CASES + "bounds", folder=str(folder), requests=sent, **settings)[0]
    assert result["limits"]["max_model_len"] == limit
    assert blocks is None or result["limits"]["num_blocks"] == blocks
    judged = Judged()
    for name, (status, request) in requests.items():
        answer = result["answers"][name]
        assert (answer["status"], answer["terminal_events"]) == (status, 1), name
        if status == 200:
            assert (answer["finish"], len(answer["tokens"])) == ("length", request["max_tokens"]), name
            if answer["tokens"]:
                judge_greedy(folder, request["prompt"], answer["tokens"], judged)
        else:
            words = "at least 1 token" if not request["prompt"] else f"the maximum context length is {limit} tokens"
            assert words in answer["error"], name


def test_the_queue_is_bounded_and_opens_again(ranks: RankPool, checkpoint: Checkpoint) -> None:
    settings = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 64, "max_queue": 5}
    result = ranks.run(2, CASES + "full_queue", folder=str(checkpoint("mixtral", "plain")), count=20, **settings)[0]
    for wave in result["waves"]:
        assert wave["status"] == [200] * 8 + [429] * 12
        assert wave["waiting"] == 5
    assert len(result["retries"]) == 24
    assert min(result["retries"]) > 0
    assert result["ends"] == [1] * 40


@pytest.mark.parametrize(
    ("family", "world", "lookahead", "seed"),
    [
        ("mixtral", 1, True, 1),
        ("mixtral", 2, False, 2),
        ("qwen3_next", 1, False, 3),
        ("qwen3_next", 2, True, 4),
    ],
)
def test_an_abort_storm_leaves_nothing_behind(
    ranks: RankPool, checkpoint: Checkpoint, family: str, world: int, lookahead: bool, seed: int
) -> None:
    folder = checkpoint(family, "plain")
    lengths = [(1, 12), (5, 1), (7, 50), (16, 6), (17, 0), (40, 9), (3, 40)]
    requests: list[dict[str, Any]] = [{"prompt": prompt(a, seed=a), "max_tokens": b} for a, b in lengths]
    sampled = {"temperature": 0.9, "repetition_penalty": 1.2, "logprobs": 2, "prompt_logprobs": 1}
    requests += [request | sampled for request in requests[:3]]
    settings = {
        "max_model_len": 64,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 21,
        "num_blocks": 9,
        "block_size": 8,
        "max_queue": 30,
        "enable_prefix_caching": family == "mixtral",
    }
    result = ranks.run(
        world,
        CASES + "abort_storm",
        folder=str(folder),
        requests=requests,
        submissions=400,
        seed=seed,
        lookahead=lookahead,
        **settings,
    )[0]
    answers = result["answers"]
    assert len(answers) > 400
    assert set(result["kinds"]) == {
        "in one breath",
        "before its first token",
        "in the middle",
        "after its end",
        "of nobody",
        "twice",
    }
    assert result["preemptions"] > 0
    whole: dict[int, list[int]] = {}
    ends: dict[str, int] = {}
    for name, answer in answers.items():
        ends[answer["finish"]] = ends.get(answer["finish"], 0) + 1
        assert answer["terminal_events"] == 1, name
        if answer["finish"] == "abort":
            assert name in result["aborted"], name
        elif answer["finish"] == "error":
            assert answer["status"] == 429, name
        else:
            number = int(name.split(":")[0])
            assert len(answer["tokens"]) == requests[number]["max_tokens"]
            assert whole.setdefault(number, answer["tokens"]) == answer["tokens"], name
    assert min(ends[finish] for finish in ("abort", "length")) > 20
    for name, answer in answers.items():
        number = int(name.split(":")[0])
        assert answer["tokens"] == whole[number][: len(answer["tokens"])], name
    judged = Judged()
    for number in range(len(lengths)):
        if whole[number]:
            judge_greedy(folder, requests[number]["prompt"], whole[number], judged)
