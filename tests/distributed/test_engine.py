"""What the engine promises beside right tokens: who fails, who does not, and what nobody else can disturb."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_greedy import check, mixed_requests
from tests.support.checkpoints import VOCAB, hf_logits, prompt
from tests.support.ranks import RankPool

CASES = "tests.distributed.engine_cases:"
Checkpoint = Callable[[str, str], Path]
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 64}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
@pytest.mark.parametrize("finishing", [2, 3])
def test_finishing_prefills_beside_decode_rows_sample_their_own_distributions(
    ranks: RankPool, checkpoint: Checkpoint, family: str, finishing: int
) -> None:
    folder = checkpoint(family, "plain")
    requests = mixed_requests((5, 9), 12) + [{"prompt": prompt(7 + i, seed=40 + i), "max_tokens": 6} for i in range(finishing)]
    result = ranks.run(2, CASES + "record_prefills", folder=str(folder), requests=requests, later=2, **SETTINGS)[0]
    assert [finishing, 2] in [list(step) for step in result["steps"]], "no step had the rows that this test is about"
    check(folder, requests, result["answers"])


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_a_rehearsal_leaves_nothing_behind(ranks: RankPool, checkpoint: Checkpoint, family: str) -> None:
    folder, requests = checkpoint(family, "plain"), mixed_requests((4, 30, 90), 6)
    head, other = ranks.run(2, CASES + "generate_rehearsed", folder=str(folder), requests=requests, **SETTINGS)
    assert list(head[:2]) == list(other) == [False, True]
    check(folder, requests, head[2])


def test_sampling_does_not_depend_on_company(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder = checkpoint("mixtral", "plain")
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 11},
        {"temperature": 1.3, "seed": 12, "top_p": 0.7},
        {"temperature": 1.0, "seed": 13, "top_k": 9, "repetition_penalty": 1.3},
        {"temperature": 0.7, "seed": 14, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    ]
    requests = [{"prompt": prompt(6 + i, seed=i), "max_tokens": 20, **kind} for i, kind in enumerate(kinds)]
    run = {"folder": str(folder), "requests": requests}
    alone = ranks.run(1, CASES + "generate", together=False, **run, **SETTINGS)[0]["answers"]
    for world, lookahead in ((1, True), (2, False), (3, True)):
        together = ranks.run(world, CASES + "generate", together=True, lookahead=lookahead, **run, **SETTINGS)[0]["answers"]
        assert [a["tokens"] for a in together] == [a["tokens"] for a in alone]
    assert len({tuple(a["tokens"]) for a in alone}) == len(requests)


def test_logprobs_of_prompt_and_answer_are_the_models_own(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder, ids = checkpoint("qwen3_moe", "plain"), prompt(70)
    request = {"prompt": ids, "max_tokens": 5, "logprobs": 3, "prompt_logprobs": 2}
    answer = ranks.run(2, CASES + "generate", folder=str(folder), requests=[request], together=True, **SETTINGS)[0]["answers"][0]
    values = hf_logits(folder, ids + answer["tokens"]).log_softmax(-1)
    expected = [values[place, token].item() for place, token in enumerate((ids + answer["tokens"])[1:])]
    assert answer["prompt_logprobs"] == pytest.approx(expected[: len(ids) - 1], abs=1e-4)
    assert answer["logprobs"] == pytest.approx(expected[len(ids) - 1 :], abs=1e-4)


def test_an_alloc_that_one_rank_cannot_prepare_fails_its_request_alone(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder, requests = checkpoint("qwen3_next", "plain"), mixed_requests((4, 30, 8), 9)
    for rank in (0, 1, 2):
        answers = ranks.run(3, CASES + "fail_alloc", folder=str(folder), requests=requests, rank=rank, nth=2, **SETTINGS)[0]
        assert (answers[1]["finish"], answers[1]["status"], answers[1]["terminal_events"]) == ("error", 500, 1)
        assert f"rank {rank}" in answers[1]["error"]
        assert "no room, on this rank alone" in answers[1]["error"]
        check(folder, [requests[0], requests[2]], [answers[0], answers[2]])


def test_a_forward_that_fails_on_every_rank_fails_its_request_alone(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder, broken = checkpoint("mixtral", "plain"), 77
    requests = [r for r in mixed_requests((4, 30, 8), 9) if broken not in r["prompt"]]
    requests.insert(1, {"prompt": [5, broken, 9], "max_tokens": 4})
    case = CASES + "fail_forward"
    answers = ranks.run(2, case, folder=str(folder), requests=requests, ranks=[0, 1], token=broken, **SETTINGS)[0]
    assert (answers[1]["finish"], answers[1]["status"], answers[1]["terminal_events"]) == ("error", 500, 1)
    assert f"token {broken} breaks the forward" in answers[1]["error"]
    check(folder, requests[:1] + requests[2:], answers[:1] + answers[2:])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_forward_that_fails_on_one_rank_ends_the_epoch_everywhere(ranks: RankPool, checkpoint: Checkpoint, rank: int) -> None:
    folder = checkpoint("mixtral", "plain")
    request = {"prompt": [5, 77, 9], "max_tokens": 4}
    outcomes = ranks.outcomes(
        2, CASES + "fail_forward", folder=str(folder), requests=[request], ranks=[rank], token=77, grace=30.0, **SETTINGS
    )
    assert outcomes[0].kind == "returned"
    assert outcomes[0].value.startswith(("EpRankFailed", "EpPeerGone"))


def test_refused_commands_leave_everything_as_it_was(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder, requests = checkpoint("qwen3_next", "plain"), mixed_requests((4, 30), 9)
    result = ranks.run(2, CASES + "refused_commands", folder=str(folder), requests=requests, **SETTINGS)[0]
    for text, part in zip(result["refusals"], ("EMPTY", "99", "10000", "EMPTY"), strict=True):
        assert part in text
    check(folder, requests, result["answers"])


@pytest.mark.parametrize("where", ["table", "recurrent"])
def test_digest_sees_a_rank_whose_state_differs(ranks: RankPool, checkpoint: Checkpoint, where: str) -> None:
    folder = checkpoint("qwen3_next", "plain")
    outcomes = ranks.outcomes(2, CASES + "diverge", folder=str(folder), where=where, grace=30.0, **SETTINGS)
    assert outcomes[0].value.startswith("EpDiverged: ranks differ in digests")


def test_aborts_at_any_moment_leave_the_others_right(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder, requests = checkpoint("qwen3_5_moe", "plain"), mixed_requests((4, 90, 8, 70, 3), 12)
    aborts = {"0": 3, "1": 0, "3": 1}
    for lookahead in (False, True):
        case = CASES + "abort_some"
        answers = ranks.run(2, case, folder=str(folder), requests=requests, aborts=aborts, lookahead=lookahead, **SETTINGS)[0]
        for number in aborts:
            assert (answers[int(number)]["finish"], answers[int(number)]["terminal_events"]) == ("abort", 1)
        check(folder, [requests[2], requests[4]], [answers[2], answers[4]])


@pytest.mark.parametrize("lookahead", [False, True])
def test_grammar_masks_hold_the_token_that_they_are_for(ranks: RankPool, checkpoint: Checkpoint, lookahead: bool) -> None:
    folder, ids = checkpoint("mixtral", "plain"), prompt(12)
    allowed = [[9, 30], [40], [3, 4, 5, 6], list(range(VOCAB)), [17, 18]]
    case = CASES + "masked"
    answers = ranks.run(2, case, folder=str(folder), prompt=ids, allowed=allowed, vocab=VOCAB, lookahead=lookahead, **SETTINGS)[0]
    expected: list[int] = []
    for ids_allowed in allowed:
        row = hf_logits(folder, ids + expected)[-1]
        expected.append(max(ids_allowed, key=lambda token: row[token].item()))
    assert answers["masked"]["tokens"] == expected
    check(folder, [{"prompt": ids, "max_tokens": len(allowed)}], [answers["free"]])


def test_protocol_version_1_serves_one_sequence_at_a_time(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder, requests = checkpoint("qwen3_next", "plain"), mixed_requests((4, 30, 65), 9)
    settings = {"max_model_len": 256, "max_num_batched_tokens": 29, "protocol": 1}
    result = ranks.run(2, CASES + "generate", folder=str(folder), requests=requests, together=True, **settings)[0]
    check(folder, requests, result["answers"])


def test_prefix_hits_change_no_token(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3_moe", "plain")
    common = prompt(50, seed=3)
    requests = [{"prompt": common + prompt(5 + i, seed=i), "max_tokens": 10} for i in range(4)]
    settings = SETTINGS | {"enable_prefix_caching": True}
    result = ranks.run(2, CASES + "generate", folder=str(folder), requests=requests, together=False, **settings)[0]
    assert [answer["cached"] for answer in result["answers"]] == [0, 48, 48, 48]
    check(folder, requests, result["answers"])
