"""The rows of images on real ranks: all have the same, or the prompt is refused, or the epoch ends. DESIGN, section 9."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.vision_cases import ROWS
from tests.support.ranks import RankPool
from tests.support.vision_checkpoints import make_vision_checkpoint

CASES = "tests.distributed.vision_cases:"
Checkpoint = Callable[[str], Path]
SETTINGS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 64, "digest_interval": 0}


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    root = tmp_path_factory.mktemp("vision")
    return lambda name: make_vision_checkpoint(name, root / name)


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_the_same_enters_layer_0_on_every_rank_of_every_world(ranks: RankPool, vision: Checkpoint, name: str) -> None:
    chunks = [2, 7, 12, 20, 29, 32]
    found = [ranks.run(world, CASES + "embeds", folder=str(vision(name)), chunks=chunks, **SETTINGS)[0] for world in (1, 2, 3)]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == len(chunks)
    # Text between images, as it is without them.
    assert "00000000" not in found[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_vision_that_one_rank_has_no_room_for_changes_no_rank(ranks: RankPool, vision: Checkpoint, rank: int) -> None:
    outcomes = ranks.run(3, CASES + "no_room", folder=str(vision("qwen3_vl_moe")), rank=rank, **SETTINGS)
    assert f"voted down: rank {rank}: OUT_OF_MEMORY after 0 collectives: preparing" in outcomes[0][0]
    nbytes = ROWS * 3 * 40 * 4
    for _, held in outcomes:
        names = ["ALLOC", "DIGEST", "FREE", "DIGEST", "ALLOC", "VISION", "PREFILL_CHUNK", "DIGEST", "FREE"]
        assert [name for name, _ in held if name != "WARM"] == names
        assert [found for name, found in held if name != "WARM"] == [0, 0, 0, 0, 0, nbytes, 0, 0, 0]


def test_prompts_without_their_rows_are_refused_alike_and_the_next_one_is_served(ranks: RankPool, vision: Checkpoint) -> None:
    said = ranks.run(3, CASES + "refusals", folder=str(vision("qwen3_vl_moe")), **SETTINGS)[0]
    assert "position 3 of slot 0 has a placeholder, and no row of an image is held for it" in said["no rows"]
    for name, rows in (("a row too few", ROWS - 1), ("a row too many", ROWS + 1)):
        for rank in range(3):
            assert f"rank {rank}: COMMAND after 0 collectives: preparing: EpCommandFailed: VISION: {rows} rows" in said[name]
    assert said["before"] == said["after"]
    assert "position 4 of slot 0 is an image's, its token is no placeholder" in said["text in an image"]


def test_a_rank_whose_rows_are_withheld_refuses_and_ends_the_epoch(ranks: RankPool, vision: Checkpoint) -> None:
    outcomes = ranks.outcomes(
        3, CASES + "withheld", folder=str(vision("qwen3_vl_moe")), rank=1, stop=16, bypass=False, grace=20.0, **SETTINGS
    )
    assert outcomes[1].value.startswith(f"EpDiverged: rank 1 holds 0 rows of the images of slot 0, not {ROWS}")
    for outcome in outcomes:
        assert outcome.value.startswith("Ep")
    assert "rank 1" in outcomes[0].value.partition(" [")[0]


@pytest.mark.parametrize(
    ("stop", "sections"), [(0, ["rows"]), (3, ["rows"]), (16, ["inputs", "rows"]), (32, ["inputs"])], ids=lambda value: str(value)
)
def test_the_digest_catches_what_the_refusal_would_not(ranks: RankPool, vision: Checkpoint, stop: int, sections: list[str]) -> None:
    outcomes = ranks.outcomes(
        3, CASES + "withheld", folder=str(vision("qwen3_vl_moe")), rank=1, stop=stop, bypass=True, grace=20.0, **SETTINGS
    )
    said = outcomes[0].value
    assert said.startswith("EpDiverged: ranks differ in digests of step")
    differing = dict(re.findall(r"; (\w+): \w+ on ranks 0, 2; (\w+) on rank 1", said))
    # What differs on the way in differs in what follows.
    assert sorted(set(differing) - {"routing", "outputs"}) == sections
