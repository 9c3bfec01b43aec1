"""Ranks that differ end the epoch with a report of what differs; a head whose books do not add up does, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import RankPool

CASES = "tests.distributed.divergence_cases:"
Checkpoint = Callable[[str, str], Path]
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
SECTIONS = ("slots", "lengths", "blocks", "conv", "h", "routing")


@pytest.mark.parametrize("section", SECTIONS)
def test_the_report_names_the_section_and_the_rank_that_differ(ranks: RankPool, checkpoint: Checkpoint, section: str) -> None:
    rank = SECTIONS.index(section) % 3
    outcomes = ranks.run(
        3, CASES + "diverge", folder=str(checkpoint("qwen3_next", "plain")), section=section, rank=rank, **SETTINGS
    )
    error, _ = outcomes[0]
    assert error.startswith("EpDiverged: ranks differ in digests of step")
    differing = [name for name in SECTIONS if f"; {name}: " in error]
    assert differing == [section]
    others = ", ".join(str(number) for number in range(3) if number != rank)
    assert f"on ranks {others}" in error.split(f"; {section}: ")[1]
    assert f"on rank {rank}" in error.split(f"; {section}: ")[1]


def test_every_rank_logs_its_slot_table_when_ranks_differ(ranks: RankPool, checkpoint: Checkpoint) -> None:
    outcomes = ranks.run(3, CASES + "diverge", folder=str(checkpoint("mixtral", "plain")), section="lengths", rank=2, **SETTINGS)
    tables = [lines for _, lines in outcomes]
    assert [len(lines) for lines in tables] == [1, 1, 1]
    for rank, (line,) in enumerate(tables):
        assert line.startswith(f"WARNING slot table of rank {rank}:\n  slot 0: ACTIVE, length ")
        assert "blocks 0" in line
    lengths = [line.split("length ")[1].split()[0] for (line,) in tables]
    # The rank that differs has been altered once more, for the report's own digest comes after the log.
    assert int(lengths[0]) == int(lengths[1]) == int(lengths[2]) - 1


def test_ranks_are_compared_once_after_work_has_stopped(ranks: RankPool, checkpoint: Checkpoint) -> None:
    names, said = ranks.run(2, CASES + "idle", folder=str(checkpoint("mixtral", "plain")), damage="nothing", **SETTINGS)[0]
    assert said == ""
    work = ["ALLOC", "PREFILL_CHUNK", "DECODE", "DECODE", "FREE"]
    assert names == [*work, "rest", "DIGEST", "PING", "PING"] * 2


@pytest.mark.parametrize(
    ("damage", "text"),
    [("block", "block 0 has 0 holders"), ("ghost", "['ghost']"), ("slot", "[2] sample"), ("penalties", "the pool gave [0]")],
)
def test_books_that_do_not_add_up_when_idle_end_the_epoch(ranks: RankPool, checkpoint: Checkpoint, damage: str, text: str) -> None:
    outcomes = ranks.outcomes(2, CASES + "idle", folder=str(checkpoint("mixtral", "plain")), damage=damage, grace=20.0, **SETTINGS)
    names, said = outcomes[0].value
    assert said.startswith("EpDiverged: ")
    assert text in said
    assert names[-2:] == ["DIGEST", "DIGEST"], "the second one asks for the slot tables"


def test_a_ranks_own_index_is_checked_when_nothing_is_held(ranks: RankPool, checkpoint: Checkpoint) -> None:
    outcomes = ranks.outcomes(2, CASES + "wrong_index", folder=str(checkpoint("mixtral", "plain")), grace=20.0, **SETTINGS)
    assert outcomes[1].value.startswith("EpDiverged: slot table: block 3 has 0 users, the index says 1")
    assert outcomes[0].value.startswith("Ep")
