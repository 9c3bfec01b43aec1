"""The traps of DESIGN section 9 that real ranks can fall into, and that no other test names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_greedy import check, mixed_requests
from tests.support.checkpoints import prompt
from tests.support.ranks import RankPool

CASES = "tests.distributed.edge_cases:"
Checkpoint = Callable[[str, str], Path]
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def test_ranks_with_different_room_agree_on_one_number_of_blocks(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder = checkpoint("mixtral", "plain")
    for offers in ([60, 40, 50], [40, 60, 50], [60, 50, 40]):
        results = ranks.run(3, CASES + "different_offers", folder=str(folder), offers=offers, **SETTINGS)
        assert [blocks for blocks, _ in results] == [40, 40, 40]
        check(folder, [{"prompt": [5, 6, 7], "max_tokens": 8}], [results[0][1]])


@pytest.mark.parametrize(
    ("field", "flags"),
    [
        ("block_size", [{"block_size": 16}, {"block_size": 8}]),
        ("dtype", [{"dtype": "float32"}, {"dtype": "bfloat16"}]),
        ("slots", [{}, {"max_num_seqs": 3}]),
        ("slots", [{}, {}, {"max_num_seqs": 3}]),
        ("dtype", [{}, {"dtype": "bfloat16"}, {}]),
    ],
)
def test_different_flags_on_a_rank_are_refused_by_name_on_every_rank(
    ranks: RankPool, checkpoint: Checkpoint, field: str, flags: list[dict[str, Any]]
) -> None:
    folder = checkpoint("mixtral", "plain")
    said = ranks.run(len(flags), CASES + "different_flags", folder=str(folder), flags=flags, **SETTINGS)
    (odd,) = [rank for rank, own in enumerate(flags) if rank and own != flags[0]]
    for text in said:
        assert text.startswith("EpHandshakeRefused")
        assert f"rank {odd} " in text
        assert field in text


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_process_that_ends_with_status_0_in_a_collective_strands_nobody(
    ranks: RankPool, checkpoint: Checkpoint, leaver: int
) -> None:
    """The others notice, and their teardown uses no collective: they return."""
    folder = checkpoint("mixtral", "plain")
    outcomes = ranks.outcomes(3, CASES + "leaves_in_a_forward", folder=str(folder), leaver=leaver, grace=20.0, **SETTINGS)
    for outcome in outcomes:
        if outcome.rank == leaver:
            assert (outcome.kind, outcome.value) == ("died", 0)
        else:
            assert outcome.kind == "returned"
            assert outcome.value in ("EpPeerGone", "EpRankFailed")


def test_rows_keep_the_order_of_the_command_not_of_the_slots(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3_next", "plain")
    requests = [{"prompt": prompt(3 + i, seed=i), "max_tokens": most} for i, most in enumerate((2, 14, 4, 12, 9, 8, 7))]
    result = ranks.run(2, CASES + "rows_out_of_slot_order", folder=str(folder), requests=requests, **SETTINGS)[0]
    assert result["unsorted"] > 0
    check(folder, requests, result["answers"])


@pytest.mark.parametrize("layout", ["replicated", "data"])
def test_blocks_and_prefixes_are_what_the_head_says_whatever_it_says(ranks: RankPool, checkpoint: Checkpoint, layout: str) -> None:
    """No rank could come to the same by a pool or a prefix tree of its own, however alike those of all ranks may be."""
    folder, common = checkpoint("qwen3_moe", "plain"), prompt(50, seed=3)
    waves = [[{"prompt": common + prompt(3 + n, seed=n), "max_tokens": 12 + n} for n in range(size)] for size in (1, 4, 3, 5)]
    settings = SETTINGS | {"max_model_len": 96, "num_blocks": 22, "block_size": 8, "attention_layout": layout}
    result = ranks.run(3, CASES + "drawn_by_lot", folder=str(folder), waves=waves, **settings)[0]
    assert min(result["blocks"], result["prefixes"], sum(answer["cached"] for answer in result["answers"])) > 0
    assert layout == "data" or result["preemptions"] > 0
    check(folder, [request for wave in waves for request in wave], result["answers"])


def test_a_long_prompt_is_one_command_and_as_many_collectives_as_a_short_one(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder = checkpoint("mixtral", "few")
    settings = {"max_model_len": 4600, "max_num_seqs": 2, "max_num_batched_tokens": 4600}
    counted = []
    for length in (4, 4500):
        request = {"prompt": prompt(length), "max_tokens": 2}
        counted.append(ranks.run(2, CASES + "count_collectives", folder=str(folder), requests=[request], **settings)[0])
    short, long = counted
    assert (long["commands"], long["collectives"]) == (short["commands"], short["collectives"])
    assert [(a["finish"], len(a["tokens"])) for a in long["answers"]] == [("length", 2)]


def test_the_tokens_of_a_step_reach_the_ranks_in_one_collective(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder = checkpoint("mixtral", "few")
    counted = []
    for sequences in (1, 4):
        requests = [{"prompt": prompt(4, seed=number), "max_tokens": 5} for number in range(sequences)]
        counted.append(ranks.run(2, CASES + "count_collectives", folder=str(folder), requests=requests, **SETTINGS)[0])
    one, four = counted
    assert [len(answer["tokens"]) for answer in four["answers"]] == [5] * 4
    assert four["collectives"] == one["collectives"]


def test_two_ranks_and_one_give_the_same_tokens_past_every_buffer(ranks: RankPool, checkpoint: Checkpoint) -> None:
    """A frame of many kilobytes of tokens, in one chunk and in ragged ones."""
    folder = checkpoint("mixtral", "few")
    requests = [{"prompt": prompt(4500), "max_tokens": 3}, *mixed_requests((7,), 3)]
    tokens = []
    for world, budget in ((1, 4600), (2, 4600), (2, 1009)):
        settings = {"max_model_len": 4600, "max_num_seqs": 2, "max_num_batched_tokens": budget}
        result = ranks.run(world, CASES + "count_collectives", folder=str(folder), requests=requests, **settings)[0]
        tokens.append([answer["tokens"] for answer in result["answers"]])
        assert {answer["finish"] for answer in result["answers"]} == {"length"}
    assert tokens[0] == tokens[1] == tokens[2]
