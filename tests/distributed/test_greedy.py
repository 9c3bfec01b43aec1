"""Greedy tokens of real ranks equal transformers', alone and in every kind of company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import CASES, prompt
from tests.support.greedy import Judged, judge_greedy
from tests.support.ranks import RankPool

GENERATE = "tests.distributed.engine_cases:generate"
LENGTHS = (1, 2, 63, 64, 65, 200)
Checkpoint = Callable[[str, str], Path]


def mixed_requests(lengths: tuple[int, ...], most: int) -> list[dict[str, Any]]:
    """One request a prompt length, that generate for `most` tokens, `most - 1` and so on, so that they end one by one."""
    return [{"prompt": prompt(length, seed=i), "max_tokens": most - i} for i, length in enumerate(lengths)]


def check(folder: Path, requests: list[dict[str, Any]], answers: list[dict[str, Any]]) -> Judged:
    """Every answer is complete, ended once, and is what transformers would say."""
    judged = Judged()
    for request, answer in zip(requests, answers, strict=True):
        assert (answer["finish"], answer["terminal_events"], answer["error"]) == ("length", 1, None)
        assert len(answer["tokens"]) == request["max_tokens"]
        judge_greedy(folder, request["prompt"], answer["tokens"], judged)
    return judged


@pytest.mark.parametrize(("family", "variant"), CASES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_mixed_batches_in_odd_chunks(ranks: RankPool, checkpoint: Checkpoint, family: str, variant: str, world: int) -> None:
    folder, requests = checkpoint(family, variant), mixed_requests(LENGTHS, 13)
    result = ranks.run(
        world,
        GENERATE,
        folder=str(folder),
        requests=requests,
        together=True,
        max_num_seqs=6,
        max_num_batched_tokens=47,
        max_model_len=256,
    )[0]
    judged = check(folder, requests, result["answers"])
    assert judged.ties == 0


@pytest.mark.parametrize(("family", "variant"), [("mixtral", "plain"), ("qwen3_next", "plain"), ("qwen3_5_moe", "fused")])
@pytest.mark.parametrize("lookahead", [False, True], ids=["results-first", "planned-ahead"])
def test_alone_batched_preempted_and_chunked_agree(
    ranks: RankPool, checkpoint: Checkpoint, family: str, variant: str, lookahead: bool
) -> None:
    folder, requests = checkpoint(family, variant), mixed_requests((1, 2, 63, 64, 65), 40)

    def run(together: bool, seqs: int, budget: int, **settings: Any) -> dict[str, Any]:
        settings = {"max_model_len": 232, "max_num_seqs": seqs, "max_num_batched_tokens": budget, **settings}
        return ranks.run(2, GENERATE, folder=str(folder), requests=requests, lookahead=lookahead, together=together, **settings)[0]

    alone = run(False, 1, 256)
    batched = run(True, 8, 512)
    chunked = run(True, 4, 13)
    preempted = run(True, 5, 64, num_blocks=29, block_size=8)
    assert preempted["preemptions"] > 0
    for result in (alone, batched, chunked, preempted):
        check(folder, requests, result["answers"])
        assert [a["tokens"] for a in result["answers"]] == [a["tokens"] for a in alone["answers"]]
    assert batched["steps"] < alone["steps"]
