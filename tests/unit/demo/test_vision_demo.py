"""The vision demo's pictures, words and folder, without its training."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from ep_runtime.demo import vision_training
from ep_runtime.demo.checkpoint import DemoUnavailable
from ep_runtime.demo.client import WrongAnswer, content_of, file_uri
from ep_runtime.demo.vision_checkpoint import vision_checkpoint
from ep_runtime.demo.vision_client import judge
from ep_runtime.demo.vision_folder import write_folder
from ep_runtime.demo.vision_pictures import COLOURS, SHAPES, Subject, data_uri, draw, png, subjects
from ep_runtime.demo.vision_text import ONE, TALK, TWO, answer_of, build_tokenizer, render

FILLED = {"circle": math.pi / 4, "square": 1.0, "triangle": 0.5}
"""Share of its bounding box that a shape covers."""


@pytest.mark.parametrize("subject", subjects(), ids=str)
def test_a_drawing_shows_its_colour_and_its_shape(subject: Subject) -> None:
    chance = random.Random(str(subject))
    for _ in range(5):
        pixels = np.asarray(draw(subject, chance)).astype(int)
        inside = (np.abs(pixels - pixels[0, 0]).sum(-1)) > 0
        rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
        box = inside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert min(box.shape) > 0.7 * min(inside.shape)
        assert abs(box.mean() - FILLED[subject.shape]) < 0.03
        mean = pixels[inside].mean(0)
        assert min(COLOURS, key=lambda name: np.abs(np.array(COLOURS[name]) - mean).sum()) == subject.colour


def test_the_same_chance_draws_the_same_picture_and_sizes_vary() -> None:
    first, second = ([png(draw(subject, chance)) for subject in subjects()] for chance in (random.Random(5), random.Random(5)))
    assert first == second
    assert len({Image.open(io.BytesIO(data)).size for data in first}) > 4
    assert draw(subjects()[0], random.Random(5), (40, 60)).size == (40, 60)


def test_uris_hold_the_files(tmp_path: Path) -> None:
    image = draw(Subject("red", "circle"), random.Random(0))
    head, _, data = data_uri(image).partition(",")
    assert head == "data:image/png;base64"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), np.asarray(image))
    image.save(tmp_path / "picture.webp", lossless=True)
    assert file_uri(tmp_path / "picture.webp").startswith("data:image/webp;base64,")
    assert content_of("why", ()) == "why"
    parts = content_of("why", ["data:a", "data:b"])
    assert isinstance(parts, list)
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]


def test_answers_of_a_kind_have_the_same_number_of_tokens() -> None:
    tokenizer = build_tokenizer()
    assert {len(tokenizer.encode(answer_of([one])).ids) for one in subjects()} == {3}
    assert {len(tokenizer.encode(answer_of(pair)).ids) for pair in itertools.product(subjects(), repeat=2)} == {11}
    for text in (ONE, TWO, *TALK, *TALK.values(), "é 日本 words that it was never told\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert build_tokenizer().to_str() == tokenizer.to_str()


def test_transformers_reads_the_folder_and_writes_the_same_prompts(tmp_path: Path) -> None:
    write_folder(tmp_path, build_tokenizer())
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.text_config.num_experts, config.vision_config.depth) == (4, 2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    named = json.loads((tmp_path / "config.json").read_text())
    pictures = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": TWO}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": pictures}], add_generation_prompt=True, tokenize=False)
    assert text == render(TWO, 2)
    ids = tokenizer(text)["input_ids"]
    assert ids.count(named["image_token_id"]) == ids.count(named["vision_start_token_id"]) == 2
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Who?"}], add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n" == render("Who?")


def test_an_answer_is_judged_by_its_colours_and_shapes_in_order() -> None:
    shown = (Subject("blue", "square"), Subject("red", "circle"))
    judge(answer_of(shown), shown)
    judge("a red circle", shown[1:])
    for answer in ("", "a red square", "a blue circle", "a red circle, a red circle", answer_of(shown[::-1])):
        with pytest.raises(WrongAnswer, match="the picture shows a red circle"):
            judge(answer, shown[1:])
    assert {word for subject in subjects() for word in str(subject).split()} == {"a", *COLOURS, *SHAPES}


def test_a_training_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DemoUnavailable, match="ended with status 1"):
        vision_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_trained_folder_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ep_runtime.demo.vision_checkpoint._train", lambda folder: (folder / "config.json").write_text("{}"))
    folder = vision_checkpoint(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert vision_checkpoint(tmp_path) == folder
    assert list(tmp_path.iterdir()) == [folder]


def test_a_training_that_learns_nothing_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"ROUNDS": ((2, 1e-3), (1, 1e-3)), "PICTURES": 24, "HELD_OUT": 24}.items():
        monkeypatch.setattr(vision_training, name, value)
    monkeypatch.setattr(sys, "argv", ["vision_training", str(tmp_path)])
    assert vision_training.main() == 1
    assert "it must be at most 0.006" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
