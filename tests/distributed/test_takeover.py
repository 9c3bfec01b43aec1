"""A frontend that takes another's place: nothing of the old one goes on, and the new one's is as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.distributed.test_greedy import check
from tests.support.ranks import RankPool


def test_what_an_earlier_frontend_left_ends_at_once(ranks: RankPool, checkpoint: Callable[[str, str], Path]) -> None:
    folder = checkpoint("mixtral", "plain")
    case = "tests.distributed.takeover_cases:takeover"
    found = ranks.run(2, case, folder=str(folder), max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64)[0]
    answers = found["answers"]
    old = ["old-0", "old-1", "old-2", "old-3", "old-late", "old-mask"]
    assert found["ended"] == old
    assert [answers[name]["terminal_events"] for name in old] == [1] * 6
    assert {answers[name]["finish"] for name in old if name != "old-late"} == {"abort"}
    assert (answers["old-late"]["finish"], answers["old-late"]["status"]) == ("error", 503)
    check(folder, [{"prompt": [5, 6, 7], "max_tokens": 8}], [answers["new-1"]])
