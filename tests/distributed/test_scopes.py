"""How far a failure reaches: a command's, a batch's, a suspect's. DESIGN, section 5."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_greedy import check, mixed_requests
from tests.support.checkpoints import prompt
from tests.support.ranks import RankPool

CASES = "tests.distributed.scope_cases:"
Checkpoint = Callable[[str, str], Path]
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 64}


def requests_of(count: int, max_tokens: int = 8) -> list[dict[str, Any]]:
    return [{"prompt": prompt(3 + number, seed=number), "max_tokens": max_tokens} for number in range(count)]


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("steps", [[1], [4], [2, 6]])
def test_a_failed_batch_fails_nobody_and_is_computed_again(
    ranks: RankPool, checkpoint: Checkpoint, steps: list[int], lookahead: bool
) -> None:
    folder, requests = checkpoint("qwen3_next", "plain"), requests_of(4)
    case = CASES + "failing_steps"
    result = ranks.run(3, case, folder=str(folder), requests=requests, steps=steps, lookahead=lookahead, **SETTINGS)[0]
    check(folder, requests, result["answers"])
    assert [answer["terminal_events"] for answer in result["answers"]] == [1] * 4
    alone = {rows[0] for rows in result["rows"] if len(rows) == 1}
    assert sorted(alone) == ([] if len(steps) < 2 else ["0", "1", "2", "3"]), "two failed batches make suspects"


def test_only_the_request_that_fails_alone_gets_the_error(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder, broken = checkpoint("mixtral", "plain"), 77
    requests = [r for r in mixed_requests((4, 30, 8, 5), 9) if broken not in r["prompt"]]
    requests.insert(1, {"prompt": [5, broken, 9], "max_tokens": 4})
    result = ranks.run(2, CASES + "token_breaks", folder=str(folder), requests=requests, token=broken, **SETTINGS)[0]
    answers = result["answers"]
    assert (answers[1]["finish"], answers[1]["status"], answers[1]["terminal_events"]) == ("error", 500, 1)
    assert f"token {broken} breaks the forward" in answers[1]["error"]
    with_it = [rows for rows in result["rows"] if "1" in rows]
    assert [len(rows) == 1 for rows in with_it] == [False, False, True], "two batches with others, then alone"
    check(folder, requests[:1] + requests[2:], answers[:1] + answers[2:])


def test_out_of_memory_alike_on_all_ranks_is_a_failed_batch(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder, requests = checkpoint("qwen3_moe", "plain"), requests_of(3, 4)
    result = ranks.run(2, CASES + "no_memory", folder=str(folder), requests=requests, most=2, **SETTINGS)[0]
    check(folder, requests, result["answers"])
    assert [len(rows) for rows in result["rows"]][:2] == [3, 3]
    assert {len(rows) for rows in result["rows"]} >= {1, 3}


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("suspicions", [1, 2])
def test_the_page_names_a_suspect_only_while_it_is_alone_on_the_device(
    ranks: RankPool, checkpoint: Checkpoint, suspicions: int, lookahead: bool
) -> None:
    folder, requests = checkpoint("mixtral", "plain"), requests_of(6)
    result = ranks.run(
        2,
        CASES + "suspect",
        folder=str(folder),
        requests=requests,
        number=3,
        suspicions=suspicions,
        lookahead=lookahead,
        **SETTINGS,
    )[0]
    check(folder, requests, result["answers"])
    alone = [(rows, named, under_way) for rows, named, under_way in result["seen"] if named or rows == ["3"]]
    assert alone == ([(["3"], "3", 0)] * 8 if suspicions > 1 else [])
    assert any("3" in rows and len(rows) > 1 for rows, _, _ in result["seen"]) == (suspicions < 2)
    if lookahead and suspicions < 2:
        assert max(under_way for _, _, under_way in result["seen"]) == 1
    assert result["between"] == [""]


def test_a_suspect_that_takes_a_rank_with_it_is_named_by_the_heads_page(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder, deadly = checkpoint("mixtral", "plain"), 77
    requests = [r for r in requests_of(5, 40) if deadly not in r["prompt"]]
    requests.insert(2, {"prompt": [5, deadly, 9], "max_tokens": 4})
    outcomes = ranks.outcomes(
        2, CASES + "suspect_kills", folder=str(folder), requests=requests, token=deadly, grace=20.0, **SETTINGS
    )
    assert (outcomes[1].kind, outcomes[1].value) == ("died", 7)
    named, finishes = outcomes[0].value
    assert named == "2"
    assert set(finishes.values()) == {None}


@pytest.mark.parametrize("lookahead", [False, True])
def test_no_token_is_told_of_a_step_that_another_rank_failed(ranks: RankPool, checkpoint: Checkpoint, lookahead: bool) -> None:
    """The head has launched that step and has its tokens before it knows; with lookahead it may know before it reads the last."""
    folder, requests, number = checkpoint("mixtral", "plain"), requests_of(3), 4
    case = CASES + "fails_behind"
    run = {"folder": str(folder), "requests": requests, "number": number, "ranks": [1], "lookahead": lookahead}
    head, worker = ranks.run(2, case, **run, **SETTINGS)
    kind, text, tokens = head
    assert (kind, worker) == ("EpRankFailed", "EpPeerGone")
    assert "only some ranks failed step" in text
    assert "rank 1: VALUE" in text
    assert "DECODE" in text
    assert tokens in ([number - 1] * 3, [number - 1 - lookahead] * 3)


@pytest.mark.parametrize("failed", [[1], [2], [0, 1], [0, 2], [1, 2]], ids=lambda failed: "-".join(map(str, failed)))
def test_a_step_that_some_of_three_ranks_failed_is_no_failed_batch(
    ranks: RankPool, checkpoint: Checkpoint, failed: list[int]
) -> None:
    """However many they are, and whether or not the head is one of them: the others have moved on."""
    folder, requests, number = checkpoint("mixtral", "plain"), requests_of(3), 4
    run = {"folder": str(folder), "requests": requests, "number": number, "ranks": failed}
    head, *workers = ranks.run(3, CASES + "fails_behind", **run, **SETTINGS)
    kind, text, tokens = head
    assert (kind, workers) == ("EpRankFailed", ["EpPeerGone"] * 2)
    assert "only some ranks failed step" in text
    assert [rank for rank in range(3) if f"rank {rank}: VALUE" in text] == failed
    assert tokens == [number - 1] * 3
