"""The head and its frontend: late masks, a frontend that is away, stuck or restarted, messages that are none, epochs that close."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_greedy import check
from tests.support.checkpoints import prompt
from tests.support.ranks import RankPool

CASES = "tests.distributed.head_cases:"
Checkpoint = Callable[[str, str], Path]
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def requests_of(count: int, max_tokens: int) -> list[dict[str, Any]]:
    return [{"prompt": prompt(3 + number, seed=number), "max_tokens": max_tokens} for number in range(count)]


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("comes", [False, True])
def test_a_late_mask_holds_nobody_back_and_not_for_ever(
    ranks: RankPool, checkpoint: Checkpoint, comes: bool, lookahead: bool
) -> None:
    folder, plain = checkpoint("mixtral", "plain"), requests_of(3, 12)
    before, answers = ranks.run(
        2, CASES + "late_mask", folder=str(folder), plain=plain, comes=comes, lookahead=lookahead, **SETTINGS
    )[0]
    assert before == [1, None]
    check(folder, plain, [answers[str(number)] for number in range(3)])
    masked = answers["masked"]
    assert masked["terminal_events"] == 1
    if comes:
        assert (masked["finish"], len(masked["tokens"])) == ("length", 3)
    else:
        assert (masked["finish"], masked["status"], len(masked["tokens"])) == ("error", 500, 1)
        assert "did not come within 0.02 s" in masked["error"]


@pytest.mark.parametrize("lookahead", [False, True])
def test_while_nobody_takes_results_no_step_is_made_and_the_ranks_are_kept(
    ranks: RankPool, checkpoint: Checkpoint, lookahead: bool
) -> None:
    folder, requests = checkpoint("mixtral", "plain"), requests_of(3, 12)
    result = ranks.run(2, CASES + "congested", folder=str(folder), requests=requests, lookahead=lookahead, **SETTINGS)[0]
    assert set(result["stalled"]) == {"PING"}
    assert len(result["stalled"]) > 5
    assert result["waiting"] > 5
    assert result["answers"]["masked"]["finish"] == "length"
    check(folder, requests, [result["answers"][str(number)] for number in range(3)])


def test_an_engine_that_ends_while_nobody_takes_results_ends(ranks: RankPool, checkpoint: Checkpoint) -> None:
    answers = ranks.run(
        2, CASES + "congested_shutdown", folder=str(checkpoint("mixtral", "plain")), requests=requests_of(6, 50), **SETTINGS
    )[0]
    assert [answer["finish"] for answer in answers.values()] == ["abort"] * 6


def test_a_message_that_is_none_is_answered_for_its_request_alone(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder = checkpoint("mixtral", "plain")
    answers = ranks.run(2, CASES + "broken_messages", folder=str(folder), **SETTINGS)[0]
    assert all(answer["terminal_events"] == 1 for answer in answers.values())
    for name, kind in (("new", "Submit"), ("broken mask", "Mask")):
        assert (answers[name]["finish"], answers[name]["status"]) == ("error", 400)
        assert answers[name]["error"] == f"message: {kind} of {name}"
    check(
        folder,
        [{"prompt": [5, 6, 7], "max_tokens": 6}, {"prompt": [5, 6, 7], "max_tokens": 1}],
        [answers["alive"], answers["over"]],
    )


def test_a_lost_frontends_requests_end_at_once_and_the_next_ones_are_served(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder = checkpoint("mixtral", "plain")
    steps, answers = ranks.run(2, CASES + "frontend_lost", folder=str(folder), **SETTINGS)[0]
    check(folder, [{"prompt": [5, 6, 7], "max_tokens": 8}], [answers.pop("next")])
    assert [(answer["finish"], answer["terminal_events"]) for answer in answers.values()] == [("abort", 1)] * 7
    assert steps < 20, "nothing of what is lost is computed further"


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("at", [1, 5])
def test_results_that_arrive_after_the_epoch_is_closed_are_not_shown(
    ranks: RankPool, checkpoint: Checkpoint, at: int, lookahead: bool
) -> None:
    folder = checkpoint("mixtral", "plain")
    said, forwards, tokens = ranks.run(1, CASES + "closed_in_flight", folder=str(folder), at=at, lookahead=lookahead, **SETTINGS)[0]
    assert said == "rank 1 was killed"
    assert forwards in (at, at + lookahead)
    # Of the steps under way none is shown: the last one's results, and with two under way those of the one before, are lost.
    assert len(tokens) == max(at - 1 - lookahead, 0)
