"""Memory is planned, and what does not fit fails alone: measured peaks of the largest steps, and allocations that really fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.memory_cases import HUNGRY
from tests.distributed.test_greedy import check, mixed_requests
from tests.support.ranks import RankPool
from tests.support.wide import wide_folder

CASES = "tests.distributed.memory_cases:"
Checkpoint = Callable[[str, str], Path]
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}

STEPS: dict[str, dict[str, Any]] = {
    "logits": {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 512},
    "rows": {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 1024},
    # Processors without bfloat16 arithmetic multiply in it at a sixth of the rate of float32.
    "few logits": {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 256},
    "few rows": {"max_model_len": 384, "max_num_seqs": 4, "max_num_batched_tokens": 384},
}
LARGEST = [
    ("dense", "logits", "float32", 1),
    ("dense", "few rows", "bfloat16", 2),
    ("moe", "few logits", "bfloat16", 2),
    ("moe", "rows", "float32", 1),
    ("all experts", "rows", "float32", 1),
    ("hybrid", "logits", "float32", 1),
    ("hybrid", "rows", "float32", 2),
]


@pytest.mark.parametrize(("kind", "step", "dtype", "world"), LARGEST)
def test_no_admitted_step_takes_more_than_its_line_of_the_plan(
    ranks: RankPool, tmp_path: Path, kind: str, step: str, dtype: str, world: int
) -> None:
    """Every slot in use, all that the sampler does asked for, scored prompt rows up to their bound, and on every rank."""
    folder = wide_folder(kind, tmp_path / "model", **({"vocab_size": 500} if step.endswith("rows") else {}))
    for peak, planned in ranks.run(world, CASES + "largest_step", folder=str(folder), dtype=dtype, **STEPS[step]):
        assert peak <= planned
        assert planned < 8 * peak


def with_a_hungry_one(family: str) -> tuple[list[dict[str, Any]], int]:
    """Requests, and the number of the one that has the hungry token."""
    requests = [r | {"prompt": [t if t != HUNGRY else 5 for t in r["prompt"]]} for r in mixed_requests((4, 30, 8, 5, 6), 9)]
    requests[2]["prompt"][3] = HUNGRY
    return requests, 2


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
@pytest.mark.parametrize("lookahead", [False, True])
def test_what_runs_out_of_memory_alike_fails_alone(ranks: RankPool, checkpoint: Checkpoint, family: str, lookahead: bool) -> None:
    """The allocator really fails, on both ranks: batches are recomputed, and only the request that fails alone gets the error."""
    folder = checkpoint(family, "plain")
    requests, hungry = with_a_hungry_one(family)
    answers = ranks.run(
        2, CASES + "runs_out", folder=str(folder), requests=requests, ranks=[0, 1], lookahead=lookahead, **SETTINGS
    )[0]
    bad = answers.pop(hungry)
    assert (bad["finish"], bad["status"], bad["tokens"], bad["terminal_events"]) == ("error", 500, [], 1)
    assert "can't allocate memory" in bad["error"]
    check(folder, [request for number, request in enumerate(requests) if number != hungry], answers)


@pytest.mark.parametrize("victim", [0, 1])
def test_memory_that_runs_out_on_one_rank_ends_the_epoch(ranks: RankPool, checkpoint: Checkpoint, victim: int) -> None:
    folder = checkpoint("mixtral", "plain")
    requests, _ = with_a_hungry_one("mixtral")
    ends = ranks.run(2, CASES + "runs_out", folder=str(folder), requests=requests, ranks=[victim], grace=20.0, **SETTINGS)
    assert ends[0].startswith("EpRankFailed")
    assert "can't allocate memory" in ends[0]
    assert ends[1].startswith(("EpRankFailed", "EpPeerGone"))


def test_a_step_that_has_no_room_fails_its_request_alone(tmp_path: Path) -> None:
    """256 scored rows of 400,000 float32 logits are 390 MiB; a decode row's are 1.5. The limit leaves 128.

    In a process of its own: memory that earlier tests have freed, and that the C library has kept, counts against no limit.
    """
    folder = wide_folder("dense", tmp_path / "model", vocab_size=400_000, hidden_size=32)
    settings = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    with RankPool(1) as own:
        answers = own.run(1, CASES + "too_large_a_step", folder=str(folder), spare=128 << 20, **settings)[0]
    large = answers["large"]
    assert (large["finish"], large["status"], large["terminal_events"]) == ("error", 500, 1)
    assert "can't allocate memory" in large["error"]
    assert answers["beside"]["tokens"] == answers["before"]["tokens"]
    assert answers["beside"]["finish"] == "length"
    assert (answers["after"]["finish"], len(answers["after"]["prompt_logprobs"])) == ("length", 399)


def test_a_rank_that_cannot_reserve_refuses_that_request_alone(ranks: RankPool, checkpoint: Checkpoint) -> None:
    folder, requests = checkpoint("qwen3_next", "plain"), mixed_requests((4, 30, 8, 5, 6), 9)
    answers = ranks.run(3, CASES + "cannot_reserve", folder=str(folder), requests=requests, nth=2, **SETTINGS)[0]
    bad = answers.pop(1)
    assert (bad["finish"], bad["status"], bad["terminal_events"]) == ("error", 500, 1)
    assert "can't allocate memory" in bad["error"]
    check(folder, [request for number, request in enumerate(requests) if number != 1], answers)
