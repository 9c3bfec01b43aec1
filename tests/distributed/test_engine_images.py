"""Images through whole engines of real ranks, against transformers: every family and world, and whatever interrupts a request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.messages import Submit, VisionInput
from tests.support.engine_fleet import Fleet, Request, settings_of
from tests.support.ranks import RankPool
from tests.support.vision_checkpoints import IMAGE, VIDEO, make_vision_checkpoint
from tests.support.vision_greedy import inputs_of, judge_vision, request_of, trimmed, with_aliases
from tests.support.vision_prompts import Picture, Video, VisionPrompt, vision_prompt

CASES = "tests.distributed.engine_images_cases:"
Folders = Callable[[str], Path]
SETTINGS: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "digest_interval": 1,
}
NO_HIDDEN_STATES = "00000000"
BIAS = {IMAGE: 3.0, VIDEO: 3.0}
"""Enough that every model often samples a placeholder."""

PROMPTS = {
    "text first": vision_prompt(7, seed=1),
    "one": vision_prompt(4, Picture(2, 3), 6, seed=2),
    "three": vision_prompt(1, Picture(5, 4, seed=1), 3, Picture(1, 2, seed=2), Picture(2, 4, seed=3), 4, seed=3),
    "first": trimmed(vision_prompt(Picture(3, 2, seed=4), 5, seed=4), front=1),
    "last": trimmed(vision_prompt(11, Picture(2, 4, seed=5), seed=5), back=1),
    "alone": trimmed(vision_prompt(Picture(4, 3, seed=6), seed=6), front=1, back=1),
    "video": vision_prompt(2, Video(2, 3, groups=3, seed=7), 3, Picture(2, 3, seed=8), 2, seed=7),
    "text last": vision_prompt(9, seed=8),
}
"""Each image prompt is longer than what a step has room for beside others, or not a multiple of it: borders fall inside images."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("vision")

    def folder(name: str) -> Path:
        target = root / f"{name}-aliases"
        return target if target.exists() else with_aliases(make_vision_checkpoint(name, root / name), target)

    return folder


def requests_of(prompts: dict[str, VisionPrompt], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {name: request_of(prompt, max_tokens, logprobs=0, **more) for name, prompt in prompts.items()}


def check(folder: Path, record: dict[str, Any], prompts: dict[str, VisionPrompt] | None = None) -> None:
    """All answers are transformers', and after every forward all ranks had the same hidden states enter layer 0."""
    for name, answer in record["answers"].items():
        judge_vision(folder, (PROMPTS if prompts is None else prompts)[name], answer)
    check_compared(record)


def check_compared(record: dict[str, Any]) -> None:
    """DIGEST came after every forward that did not fail, and once more at the end, and had hidden states to compare."""
    forwards = sum(bool(step["spans"]) for step in record["steps"]) - record["failed"]
    assert record["commands"]["DIGEST"] == len(record["inputs"]) > forwards
    assert NO_HIDDEN_STATES not in record["inputs"]


def tokens_of(record: dict[str, Any]) -> dict[str, list[int]]:
    return {name: answer["tokens"] for name, answer in record["answers"].items()}


def cut_images(record: dict[str, Any], prompts: dict[str, VisionPrompt]) -> set[str]:
    """The requests of which some span began inside an image."""
    return {
        name
        for step in record["steps"]
        for name, start, _ in step["spans"]
        if any(grid.start < start < grid.stop for grid in prompts[name].grids)
    }


def slots_used_again(record: dict[str, Any], prompts: dict[str, VisionPrompt]) -> set[str]:
    """The requests of text alone whose slot had an image's before."""
    last: dict[int, str] = {}
    found = set()
    for step in record["steps"]:
        for name, slot in step["allocs"]:
            if not prompts[name].grids and slot in last and prompts[last[slot]].grids:
                found.add(name)
            last[slot] = name
    return found


def mixed_steps(record: dict[str, Any], prompts: dict[str, VisionPrompt]) -> int:
    """Steps in which rows of an image were beside rows of a request of text alone."""
    return sum(
        any(
            start < grid.stop and grid.start < start + length
            for name, start, length in step["spans"]
            for grid in prompts[name].grids
        )
        and any(not prompts[name].grids for name, _, _ in step["spans"])
        for step in record["steps"]
    )


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_vl", "qwen3_5_moe", "qwen3_5"])
def test_answers_equal_transformers_in_every_world(ranks: RankPool, folders: Folders, name: str) -> None:
    """Once with the log-probabilities of every row of the prompts, image rows included; and in the pieces of ordinary prompts."""
    folder = folders(name)
    records = {}
    for world in (1, 2, 3):
        requests = requests_of(PROMPTS, 6, **({"prompt_logprobs": 0} if world == 2 else {}))
        record = ranks.run(world, CASES + "serve", folder=str(folder), requests=requests, **SETTINGS)[0]
        records[world] = record
        check(folder, record)
        assert all(answer["prompt_logprobs"] for answer in record["answers"].values()) == (world == 2)
        assert cut_images(record, PROMPTS) >= {"three", "video"}
        assert slots_used_again(record, PROMPTS) == {"text last"}
        assert mixed_steps(record, PROMPTS) > 0
        assert record["commands"]["VISION"] == sum(bool(prompt.grids) for prompt in PROMPTS.values())
        assert max(record["passes"]) > 1, "several images in one pass"
        assert tokens_of(record) == tokens_of(records[1])
    assert records[1]["inputs"] == records[3]["inputs"]


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("lookahead", [False, True], ids=["results-first", "planned-ahead"])
def test_the_smallest_pieces_and_the_largest(ranks: RankPool, folders: Folders, name: str, lookahead: bool) -> None:
    """Where single rows of images are planned like rows that decode; and where all prompts are in one step."""
    folder = folders(name)
    requests = requests_of(PROMPTS, 5)
    records = []
    for rows, seqs in ((3, 3), (256, 8)):
        settings = {
            **SETTINGS,
            "max_num_batched_tokens": rows,
            "max_num_seqs": seqs,
            "max_image_tokens": 96,
            "lookahead": lookahead,
        }
        record = ranks.run(2, CASES + "serve", folder=str(folder), requests=requests, **settings)[0]
        check(folder, record)
        records.append(record)
    small, large = records
    assert tokens_of(small) == tokens_of(large)
    assert cut_images(small, PROMPTS) == {name for name, prompt in PROMPTS.items() if prompt.grids}
    assert cut_images(large, PROMPTS) == set()
    singles = [
        name
        for step in small["steps"]
        for name, start, length in step["spans"]
        if length == 1 and any(grid.start < start < grid.stop for grid in PROMPTS[name].grids)
    ]
    assert singles, "no row of an image was a span of its own"


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_few_blocks_and_rows_change_no_token(ranks: RankPool, folders: Folders, name: str) -> None:
    """Preempted sequences get their rows anew, from the cache or encoded again."""
    folder = folders(name)
    requests = requests_of(PROMPTS, 40)
    few = {**SETTINGS, "num_blocks": 26, "max_image_tokens": 32, "image_cache_bytes": 0}
    for world, settings in ((2, {}), (3, {"lookahead": True})):
        record = ranks.run(world, CASES + "serve", folder=str(folder), requests=requests, **few, **settings)[0]
        check(folder, record)
        assert record["preemptions"] > 0
        shown = sum(bool(prompt.grids) for prompt in PROMPTS.values())
        assert record["commands"]["VISION"] > shown, "no prompt with an image was preempted"
        images = sum(len(prompt.grids) for prompt in PROMPTS.values())
        assert sum(record["passes"]) > images, "nothing was encoded again"


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_placeholders_that_the_model_generates_are_plain_tokens(ranks: RankPool, folders: Folders, name: str) -> None:
    """They are fed, and given again in the prefill of a preempted sequence, behind images and where there were none."""
    folder = folders(name)
    requests = requests_of(PROMPTS, 20, logit_bias=BIAS)
    calm = ranks.run(2, CASES + "serve", folder=str(folder), requests=requests, **SETTINGS)[0]
    few = {**SETTINGS, "num_blocks": 26, "max_image_tokens": 32}
    record = ranks.run(2, CASES + "serve", folder=str(folder), requests=requests, **few)[0]
    assert record["preemptions"] > 0
    assert tokens_of(record) == tokens_of(calm)
    check_compared(record)
    given = set()
    for one, answer in record["answers"].items():
        judge_vision(folder, PROMPTS[one], answer, BIAS)
        ends = (start + length for step in record["steps"] for owner, start, length in step["spans"] if owner == one and length > 1)
        given |= set(answer["tokens"][: max(ends) - len(PROMPTS[one].tokens)])
    assert given >= {IMAGE, VIDEO}, "no prefill had a placeholder that was generated"


def test_a_prompt_that_is_allocated_too_short_for_its_last_image_is_refused(ranks: RankPool, folders: Folders) -> None:
    said = ranks.run(3, CASES + "short_prompts", folder=str(folders("qwen3_vl_moe")), **SETTINGS)[0]
    for rank in range(3):
        assert (
            f"rank {rank}: COMMAND after 0 collectives: preparing: EpCommandFailed: VISION: grids reach to 29, the prompt of"
            in said
        )


def test_prefixes_are_those_of_the_same_images(ranks: RankPool, folders: Folders) -> None:
    """Blocks with another image of the same size, behind the same text, are not found; the image is encoded once all the same."""
    folder = folders("qwen3_vl_moe")
    prompts = {
        "first": vision_prompt(3, Picture(3, 3), 8, seed=1),
        "question": vision_prompt(3, Picture(3, 3), 8, 4, seed=1),
        "other": vision_prompt(3, Picture(3, 3, seed=9), 8, 4, seed=1),
        "again": vision_prompt(3, Picture(3, 3), 8, 4, seed=1),
        "other again": vision_prompt(3, Picture(3, 3, seed=9), 8, 4, seed=1),
        "elsewhere": vision_prompt(5, Picture(3, 3), 2, seed=2),
    }
    assert prompts["question"].tokens == prompts["other"].tokens
    settings = {**SETTINGS, "enable_prefix_caching": True}
    case = CASES + "serve"
    for world in (2, 3):
        requests = requests_of(prompts, 8)
        record = ranks.run(world, case, folder=str(folder), requests=requests, together=False, **settings)[0]
        check(folder, record, prompts)
        cached = {name: answer["cached"] for name, answer in record["answers"].items()}
        assert cached == {"first": 0, "question": 20, "other": 4, "again": 24, "other again": 24, "elsewhere": 0}
        assert record["visions"] == [[9, 0], [0, 1], [9, 0], [0, 1], [0, 1], [9, 0]]
        assert record["passes"] == [1, 1]
        tokens = tokens_of(record)
        assert tokens["question"] == tokens["again"] != tokens["other"] == tokens["other again"]


# Interruptions


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("lookahead", [False, True], ids=["results-first", "planned-ahead"])
def test_aborts_at_any_moment_leave_the_others_right(ranks: RankPool, folders: Folders, name: str, lookahead: bool) -> None:
    """The first pass has images of several requests, of which one is aborted in it."""
    folder = folders(name)
    moments = {"one": "encoding", "three": "shown", "last": "encoding", "video": "decoding"}
    record = ranks.run(
        3,
        CASES + "abort_some",
        folder=str(folder),
        requests=requests_of(PROMPTS, 12),
        moments=moments,
        lookahead=lookahead,
        **SETTINGS,
    )[0]
    assert set(record["met"]) == set(moments)
    assert max(record["passes"]) > 1
    for one, answer in record["answers"].items():
        if one in moments:
            assert (answer["finish"], answer["terminal_events"]) == ("abort", 1)
            assert (len(answer["tokens"]) >= 3) == (moments[one] == "decoding")
        else:
            judge_vision(folder, PROMPTS[one], answer)
    check_compared(record)


@pytest.mark.parametrize(("name", "world"), [("qwen3_vl_moe", 2), ("qwen3_5_moe", 3)])
def test_forwards_that_fail_alike_are_computed_again(ranks: RankPool, folders: Folders, name: str, world: int) -> None:
    """Their slots are freed, and get the rows of their images anew."""
    folder, requests = folders(name), requests_of(PROMPTS, 12)
    record = ranks.run(world, CASES + "serve", folder=str(folder), requests=requests, failing=[1, 4], **SETTINGS)[0]
    check(folder, record)
    assert record["failed"] == 2
    assert record["commands"]["VISION"] > sum(bool(prompt.grids) for prompt in PROMPTS.values())


def test_protocol_version_1_shows_images_to_one_sequence_at_a_time(ranks: RankPool, folders: Folders) -> None:
    folder, requests = folders("qwen3_vl_moe"), requests_of(PROMPTS, 6)
    settings = {**SETTINGS, "max_num_seqs": 1, "protocol": 1}
    record = ranks.run(2, CASES + "serve", folder=str(folder), requests=requests, **settings)[0]
    check(folder, record)


@pytest.mark.parametrize(("name", "world"), [("qwen3_vl_moe", 3), ("qwen3_5_moe", 2)])
def test_interrupted_requests_go_on_in_the_next_epoch(ranks: RankPool, folders: Folders, name: str, world: int) -> None:
    """Their images are shown to the ranks again, and are encoded once: the head's cache outlives its epochs.

    Placeholders among the tokens that they had are plain tokens of the next epoch's prefill.
    """
    folder, requests = folders(name), requests_of(PROMPTS, 12, logit_bias=BIAS)
    records = ranks.run(world, CASES + "epochs", folder=str(folder), requests=requests, turns=[9, 14, 12], **SETTINGS)[0]
    assert all(record["commands"].get("VISION", 0) for record in records)
    interrupted = [
        answer["tokens"] for record in records[:-1] for answer in record["answers"].values() if len(answer["tokens"]) < 12
    ]
    assert {IMAGE, VIDEO} <= {token for tokens in interrupted for token in tokens}
    assert records[0]["passes"]
    assert sum(sum(record["passes"]) for record in records) == sum(len(prompt.grids) for prompt in PROMPTS.values())
    tokens = {one: answer["tokens"] for record in records for one, answer in record["answers"].items()}
    assert tokens.keys() == PROMPTS.keys()
    for one, found in tokens.items():
        judge_vision(folder, PROMPTS[one], whole_answer(found), BIAS)
        assert len(found) == 12
    for record in records[:-1]:
        assert NO_HIDDEN_STATES not in record["inputs"]
    check_compared(records[-1])


def whole_answer(tokens: list[int]) -> dict[str, Any]:
    """The answer of a request whose epochs gave these tokens in all."""
    return {"tokens": tokens, "finish": "length", "terminal_events": 1, "error": None, "logprobs": [], "prompt_logprobs": []}


@dataclass
class ImageRequest(Request):
    """A request with images, which are submitted with it every time."""

    images: list[VisionInput] = field(default_factory=list)

    def submit(self, request_id: str) -> Submit:
        return msgspec.structs.replace(super().submit(request_id), images=self.images)


def test_requests_with_images_survive_killed_ranks(folders: Folders, tmp_path: Path) -> None:
    """First a worker is killed, then the head with all that it had encoded; the images come with the requests again."""
    folder = folders("qwen3_5_moe")
    config = settings_of(folder, 2, command_timeout=30.0, **SETTINGS)
    with closing(Fleet(tmp_path, config, 2)) as fleet:
        fleet.stand_by([0, 1])
        fleet.load()
        fleet.begin()
        requests = {name: ImageRequest(prompt.tokens, 12, images=inputs_of(prompt)) for name, prompt in PROMPTS.items()}
        fleet.frontend.submit(requests)  # type: ignore[arg-type]
        for killed, most in ((1, 4), (0, 9)):
            while not any(most <= len(request.tokens) < 12 for request in requests.values()):
                fleet.frontend.pump()
            fleet.engines[killed].kill()
            fleet.end()
            assert fleet.replace_dead() == [killed]
            fleet.begin()
            fleet.frontend.replay()
        fleet.frontend.finish()
        assert set(fleet.end()) == {0, 1}
    for name, request in requests.items():
        assert (request.finish, request.error) == ("length", None)
        judge_vision(folder, PROMPTS[name], whole_answer(request.tokens))
