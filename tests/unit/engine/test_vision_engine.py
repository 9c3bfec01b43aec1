"""Images through a whole engine of one rank, against transformers: batches, chunks, preemption, prefixes, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_runtime import LLM, SamplingParams
from ep_runtime.engine.executor import Executor
from ep_runtime.engine.vision.inputs import vision_input
from model.spec import VisionSpec
from protocol.commands import Cmd
from protocol.messages import Abort, Submit, VisionInput
from protocol.messages import SamplingParams as Sampling
from tests.support.engine import Driver, head_of
from tests.support.rank_context import RankContext
from tests.support.vision_checkpoints import FRAMES, IMAGE, MERGE, PATCH, VIDEO, make_vision_checkpoint
from tests.support.vision_prompts import Picture, Video, VisionPrompt, hf_vision_logits, vision_prompt

Folder = Callable[[str], Path]
SIZES: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 4}
SPEC = VisionSpec(placeholders=(), patch=PATCH, merge=MERGE, frames=FRAMES, row_width=0)
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("vision")
    return lambda name: make_vision_checkpoint(name, root / name)


def inputs_of(prompt: VisionPrompt) -> list[VisionInput]:
    pairs = zip(prompt.grids, prompt.images, strict=True)
    return [vision_input(grid.start, image.pixels.numpy(), SPEC) for grid, image in pairs]


def judge(folder: Path, tower: Any, prompt: VisionPrompt, tokens: list[int]) -> None:
    """AssertionError unless each token is the best one of transformers after what precedes it, near ties apart.

    Behind a placeholder that was generated transformers gives no logits: it wants an image for it.
    """
    fed = next((place for place, token in enumerate(tokens) if token in (IMAGE, VIDEO)), len(tokens) - 1)
    logits = hf_vision_logits(folder, prompt, tower.config, then=tokens[:fed])[len(prompt.tokens) - 1 :]
    chosen = logits.gather(1, torch.tensor(tokens[: fed + 1])[:, None])[:, 0]
    assert len(tokens) > 0
    assert (logits.max(1).values - chosen).max() < NEAR_TIE


PROMPTS = [
    vision_prompt(4, Picture(2, 3), 6, seed=1),
    vision_prompt(9, seed=2),
    vision_prompt(Picture(5, 4, seed=1), 3, Picture(1, 2, seed=2), 2, Picture(3, 3, seed=3), 4, seed=3),
    vision_prompt(12, Picture(2, 2, seed=5), seed=4),
    vision_prompt(2, Video(2, 2, groups=3), 3, Picture(2, 3), 2, seed=5),
    vision_prompt(5, seed=6),
]


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_batches_of_images_and_text_equal_transformers(vision_folder: Folder, name: str) -> None:
    """Pieces of at most 16 rows, beside decode rows, cut images; slots are used again by text after images."""
    folder = vision_folder(name)
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    with LLM(str(folder), device="cpu", threads=1, **SIZES) as llm:
        tower = llm._rank.loaded.model.tower
        assert llm.spec.vision is not None
        assert llm.spec.inputs == ("text", "image", "video")
        shown = [inputs_of(prompt) for prompt in PROMPTS]
        outputs = llm.generate([prompt.tokens for prompt in PROMPTS], greedy, shown)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            judge(folder, tower, prompt, output.outputs[0].token_ids)
        # One prompt given by itself, and several samples of one.
        (alone,) = llm.generate(PROMPTS[2].tokens, greedy, shown[2])
        assert alone.outputs[0].token_ids == outputs[2].outputs[0].token_ids
        (several,) = llm.generate(
            [PROMPTS[0].tokens], SamplingParams(temperature=0.0, n=2, max_tokens=9, ignore_eos=True), [shown[0]]
        )
        assert [c.token_ids for c in several.outputs] == [outputs[0].outputs[0].token_ids] * 2
        with pytest.raises(ValueError, match="2 prompts, but 1 lists of images"):
            llm.generate([[5], [6]], greedy, [[]])
        (unseen,) = llm.generate(PROMPTS[0].tokens, greedy)
        assert "an image is missing" in (unseen.outputs[0].error or "")


@contextmanager
def engine(folder: Path, **settings: Any) -> Iterator[Driver]:
    ctx = RankContext(rank=0, world=1, epoch=0, store_port=0, store_fd=None, runtime_dir=Path(), kwargs={})
    with head_of(ctx, str(folder), **{**SIZES, **settings}) as driver:
        assert driver is not None
        yield driver


def send(driver: Driver, name: str, prompt: VisionPrompt, max_tokens: int = 6, **changes: Any) -> None:
    sampling = Sampling(seed=0, temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    images = inputs_of(prompt)
    driver.send(Submit(name, name, prompt.tokens, sampling, images=images, **changes))


def tower_of(driver: Driver) -> Any:
    encoder = driver.encoder
    assert encoder is not None
    return encoder._tower


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 26, "max_image_tokens": 30, "image_cache_bytes": 0},
        {"num_blocks": 30, "max_image_tokens": 31, "enable_prefix_caching": True},
        {"max_image_tokens": 31, "lookahead": True},
    ],
)
def test_few_blocks_and_rows_change_no_token(vision_folder: Folder, settings: dict[str, Any]) -> None:
    """Preempted sequences get their rows anew; with a cache for one prompt they are encoded again."""
    folder = vision_folder("qwen3_vl_moe")
    settings = {"max_model_len": 96, "digest_interval": 2, **settings}
    with engine(folder, **settings) as driver:
        tower = tower_of(driver)
        for number, prompt in enumerate([*PROMPTS, PROMPTS[2], PROMPTS[0]]):
            if sum(image.rows for image in inputs_of(prompt)) <= settings["max_image_tokens"]:
                send(driver, str(number), prompt, 20)
        answers = driver.finish()
        assert driver.scheduler.stats().preemptions > 0 or "num_blocks" not in settings
    assert len(answers) >= 6
    for name, answer in answers.items():
        assert (answer.finish, answer.terminal_events) == ("length", 1), answer.error
        judge(folder, tower, [*PROMPTS, PROMPTS[2], PROMPTS[0]][int(name)], answer.tokens)


def test_prefixes_are_those_of_the_same_images(vision_folder: Folder) -> None:
    folder = vision_folder("qwen3_vl_moe")
    first = vision_prompt(3, Picture(3, 3), 8, seed=1)
    question = vision_prompt(3, Picture(3, 3), 8, 4, seed=1)
    other = vision_prompt(3, Picture(3, 3, seed=9), 8, 4, seed=1)
    assert question.tokens == other.tokens
    with engine(folder, enable_prefix_caching=True) as driver:
        tower = tower_of(driver)
        commands = record_commands(driver)
        cached = {}
        for name, prompt in (("first", first), ("question", question), ("other", other), ("again", question)):
            send(driver, name, prompt)
            driver.finish()
            cached[name] = driver.answers[name].cached
    assert cached == {"first": 0, "question": 20, "other": 4, "again": 24}
    visions = [(command.rows, command.skipped) for command in commands if command.cmd is Cmd.VISION]
    assert visions == [(9, 0), (0, 1), (9, 0), (0, 1)]
    for name, prompt in (("first", first), ("question", question), ("other", other), ("again", question)):
        judge(folder, tower, prompt, driver.answers[name].tokens)
    assert driver.answers["question"].tokens == driver.answers["again"].tokens


def record_commands(driver: Driver) -> list[Any]:
    commands: list[Any] = []
    run = driver.broadcaster.run

    def recording(command: Any, seq_id: int, **options: Any) -> None:
        commands.append(command)
        run(command, seq_id, **options)

    driver.broadcaster.run = recording  # type: ignore[method-assign]
    return commands


# Slices between steps


def slow(driver: Driver) -> list[str]:
    """Have the encoder run one block a slice; returns what its tower does from now on."""
    encoder = driver.encoder
    assert encoder is not None
    encoder._slice_cost = 0.0
    calls: list[str] = []
    for name in ("begin", "advance", "rows"):
        wrap(encoder._tower, name, lambda name=name: calls.append(name))
    return calls


def wrap(tower: Any, name: str, before: Callable[[], None]) -> None:
    real = getattr(tower, name)

    def wrapped(*args: Any) -> Any:
        before()
        return real(*args)

    setattr(tower, name, wrapped)


def test_steps_of_others_go_on_between_the_slices(vision_folder: Folder) -> None:
    folder = vision_folder("qwen3_5_moe")
    with engine(folder) as driver:
        calls = slow(driver)
        driver.submit("text", [5, 6, 7], max_tokens=30)
        while len(driver.answers["text"].tokens) < 3:
            driver.turn()
        send(driver, "image", PROMPTS[0])
        seen = []
        while not driver.answers["image"].tokens:
            before = len(calls), len(driver.answers["text"].tokens)
            driver.turn()
            seen.append((calls[before[0] :], len(driver.answers["text"].tokens) - before[1]))
        assert calls == ["begin", "advance", "advance", "advance", "rows"], "three blocks, one a slice"
        assert all(len(made) <= 1 for made, _ in seen), "at most one slice a turn"
        assert all(tokens == 1 for made, tokens in seen[1:] if made), "and a token of the others in each"
        driver.finish()


@pytest.mark.parametrize("lookahead", [False, True])
def test_no_slice_and_no_piece_of_a_prompt_lie_between_the_same_two_tokens(vision_folder: Folder, lookahead: bool) -> None:
    """A stream, a text of six pieces, and images in a queue: slices and pieces take turns while both are due."""
    with engine(vision_folder("qwen3_5_moe"), lookahead=lookahead, max_num_seqs=5, max_num_batched_tokens=16) as driver:
        events: list[str] = slow(driver)
        driver.submit("stream", [5, 6, 7], max_tokens=60)
        while len(driver.answers["stream"].tokens) < 3:
            driver.turn()
        wrap_forward(driver, events)
        driver.submit("text", [5 + n % 40 for n in range(80)], max_tokens=1)
        for name, number in (("first", 0), ("second", 2)):
            send(driver, name, PROMPTS[number])
        driver.finish()
    assert all(answer.finish == "length" for answer in driver.answers.values())
    gaps, gap = [], []
    for event in events:
        gap.append("slice" if event in SLICES else event)
        if event not in SLICES:
            gaps.append(gap)
            gap = []
    assert {tuple(gap) for gap in gaps} == {("step",), ("piece",), ("slice", "step")}
    # Five slices of the first image beside the text's six pieces: neither waits for more than one of the other.
    assert [gap[0] for gap in gaps[:11]] == ["piece", "slice"] * 5 + ["piece"]
    assert sum(event in SLICES for event in events) == 4 * 5, "a pass of each image, since no two fit into a slice"


SLICES = ("begin", "advance", "rows")


def wrap_forward(driver: Driver, events: list[str]) -> None:
    """Note each step from now on: whether it has pieces of prompts, or just next tokens."""
    real = driver.broadcaster.run

    def run(command: Any, seq_id: int, **options: Any) -> None:
        if "tokens" in options:
            events.append("piece" if options["tokens"] else "step")
        real(command, seq_id, **options)

    driver.broadcaster.run = run  # type: ignore[method-assign]


def test_a_slice_whose_request_ends_before_its_turn_keeps_no_prompt_waiting(vision_folder: Folder) -> None:
    with engine(vision_folder("qwen3_5_moe")) as driver:
        events = slow(driver)
        wrap_forward(driver, events)
        driver.submit("text", [5 + n % 40 for n in range(80)], max_tokens=1)
        send(driver, "gone", PROMPTS[0])
        while events[-1:] != ["piece"]:
            driver.turn()
        driver.send(Abort(["gone"]))
        driver.finish(limit=20)
    assert driver.answers["text"].finish == "length"
    assert events == ["piece"] * 5


def test_an_aborted_request_ends_its_pass_and_a_shutdown_does_not_wait_for_one(vision_folder: Folder) -> None:
    with engine(vision_folder("qwen3_5_moe")) as driver:
        calls = slow(driver)
        send(driver, "gone", PROMPTS[0])
        for _ in range(3):
            driver.turn()
        driver.send(Abort(["gone"]))
        driver.finish()
        driver.turn()
        encoder = driver.encoder
        assert encoder is not None
        assert not encoder.busy
        assert "rows" not in calls
        send(driver, "late", PROMPTS[2])
        driver.turn()
        driver.turn()
        assert encoder.busy
    assert (driver.answers["gone"].finish, driver.answers["late"].finish) == ("abort", "abort")
    assert not encoder.busy


def test_a_request_that_starts_with_a_prefix_meanwhile_needs_no_image_encoded(vision_folder: Folder) -> None:
    """Its image was encoded before, is not kept, and cannot be encoded again: it has the rows' prefix from another request."""
    folder = vision_folder("qwen3_vl_moe")
    shown = vision_prompt(3, Picture(5, 4), 60, seed=1)  # its image ends in the second piece
    with engine(folder, enable_prefix_caching=True) as driver:
        tower, encoder = tower_of(driver), driver.encoder
        assert encoder is not None
        send(driver, "first", shown)
        while not driver.scheduler.stats().running:
            driver.turn()
        encoder.cache.clear()
        calls = slow(driver)

        def broken(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        tower.rows = broken
        send(driver, "second", shown)
        answers = driver.finish()
    assert calls[:1] == ["begin"], "the image was being encoded again"
    assert answers["second"].error is None
    assert answers["second"].cached >= 23
    for answer in answers.values():
        judge(folder, tower, shown, answer.tokens)


def test_a_suspects_images_are_encoded_with_nothing_else_on_the_device(vision_folder: Folder) -> None:
    folder = vision_folder("qwen3_5_moe")
    with engine(folder, lookahead=True) as driver:
        slow(driver)
        seen: list[tuple[str, int]] = []
        tower = tower_of(driver)
        for name in ("begin", "advance", "rows"):
            wrap(tower, name, lambda: seen.append((driver.page.read().alone, len(driver.head._in_flight))))
        driver.submit("text", [5, 6, 7], max_tokens=30)
        while not driver.answers["text"].tokens:
            driver.turn()
        send(driver, "suspect", PROMPTS[0], suspicions=2)
        answers = driver.finish()
        assert seen == [("suspect", 0)] * 5
        assert driver.page.read().alone == ""
    judge(folder, tower, PROMPTS[0], answers["suspect"].tokens)
    assert answers["text"].finish == "length"


# What goes wrong


def test_an_image_that_cannot_be_encoded_ends_its_request_alone(vision_folder: Folder) -> None:
    folder = vision_folder("qwen3_5_moe")
    with engine(folder) as driver:
        tower = tower_of(driver)
        begin = tower.begin

        def no_room(images: list[Any]) -> Any:
            if any(image.height == 5 for image in images):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return begin(images)

        tower.begin = no_room
        for number, prompt in enumerate(PROMPTS):
            send(driver, str(number), prompt)
        answers = driver.finish()
        assert driver.scheduler._life.rows.available == SIZES["max_model_len"]
    assert [name for name, answer in answers.items() if answer.finish != "length"] == ["2"]
    assert answers["2"].status == 500
    assert answers["2"].error is not None
    assert "of 5 x 4 tokens, cannot be encoded: CUDA out of memory" in answers["2"].error
    for name, answer in answers.items():
        if name != "2":
            judge(folder, tower, PROMPTS[int(name)], answer.tokens)


def test_a_request_whose_rows_have_no_room_gets_the_error_and_the_others_their_tokens(vision_folder: Folder) -> None:
    folder = vision_folder("qwen3_5_moe")

    def break_rows(executor: Executor) -> None:
        reserve = executor.rows.reserve

        def no_room(rows: int) -> None:
            if rows == 31:
                raise MemoryError("no room for 31 rows")
            reserve(rows)

        executor.rows.reserve = no_room  # type: ignore[method-assign]

    with engine(folder, arrange=break_rows) as driver:
        tower = tower_of(driver)
        for number, prompt in enumerate(PROMPTS):
            send(driver, str(number), prompt)
        answers = driver.finish()
    assert [name for name, answer in answers.items() if answer.finish != "length"] == ["2"]
    assert (answers["2"].status, answers["2"].tokens) == (500, [])
    assert "no room for 31 rows" in (answers["2"].error or "")
    for name, answer in answers.items():
        if name != "2":
            judge(folder, tower, PROMPTS[int(name)], answer.tokens)


def test_what_does_not_fit_together_is_refused_at_submission(vision_folder: Folder) -> None:
    with engine(vision_folder("qwen3_5_moe"), max_image_tokens=30) as driver:
        send(driver, "large", PROMPTS[2])
        driver.submit("unseen", [5, IMAGE, 6], max_tokens=2)
        send(driver, "fits", PROMPTS[0])
        answers = driver.finish()
    assert answers["large"].status == answers["unseen"].status == 400
    assert answers["large"].error == "images of the prompt have 31 tokens together; at most 30 are served at once"
    assert "an image is missing" in (answers["unseen"].error or "")
    assert answers["fits"].finish == "length"
