"""The Trellis demo's texts, its training in short, its folder, and how its answers are judged."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from ep_runtime.demo import trellis_training
from ep_runtime.demo.checkpoint import DemoUnavailable
from ep_runtime.demo.client import WrongAnswer
from ep_runtime.demo.trellis_checkpoint import trellis_checkpoint
from ep_runtime.demo.trellis_client import judge, mean_loops
from ep_runtime.demo.trellis_greedy import greedy
from ep_runtime.demo.trellis_text import END, Question, build_tokenizer, draw_question, render, write_text
from ep_runtime.demo.trellis_training import (
    Course,
    new_config,
    new_model,
    new_optimizers,
    random_plan,
    run_round,
)
from ep_runtime.demo.trellis_ways import WAYS
from model.families import registry
from model.trellis import load_checkpoint, save_checkpoint

ONE = Question((4, 7, 9, 2, 1))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_question_its_prompt_and_its_answer(tmp_path: Path) -> None:
    assert (str(ONE), ONE.answer) == ("47921", "52078")
    drawn = [draw_question(random.Random(3)) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert all(int(str(one)) + int(one.answer) == 99999 for one in drawn)
    tokenizer = build_tokenizer()
    write_text(tmp_path, tokenizer)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = theirs.apply_chat_template([{"role": "user", "content": str(ONE)}], add_generation_prompt=True, tokenize=False)
    assert text == render(ONE) == "<|user|>47921<|end|><|assistant|>"
    assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
    assert len(tokenizer.encode(text).ids) == 8
    for other in ("12 + 3?", "é 日本\n"):
        assert tokenizer.decode(tokenizer.encode(other).ids) == other


def test_a_conversation_has_its_answers_where_it_says() -> None:
    tokenizer = build_tokenizer()
    ids, places = Course(tokenizer).conversation([ONE, ONE])
    assert tokenizer.decode([ids[place] for place in places], skip_special_tokens=False) == "52078<|end|>" * 2


def test_plans_are_nested_and_let_answers_stop_anywhere() -> None:
    course, chance = Course(build_tokenizer()), random.Random(5)
    batch = next(course.lessons(chance))
    config = new_config(build_tokenizer())
    plans = [plan for _ in range(20) if (plan := random_plan(chance, config, batch, 4)) is not None]
    assert 0 < len(plans) < 20
    depths = set()
    for plan in plans:
        assert not any((later & ~earlier).any() for earlier, later in itertools.pairwise(plan))
        depths |= {1 + sum(int(mask[0, place - 1]) for mask in plan) for place in batch.answers.tolist()}
    assert depths == {1, 2, 3, 4}


def test_steps_make_the_loss_fall_and_the_folder_says_the_same(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    model, course, chance = new_model(new_config(tokenizer)), Course(tokenizer), random.Random(1)
    losses = run_round(model, new_optimizers(model), itertools.islice(course.lessons(chance), 16), chance, 16, 1.0)
    assert sum(losses[-4:]) < 0.75 * sum(losses[:4])
    save_checkpoint(model, tmp_path)
    write_text(tmp_path, tokenizer)
    config, generation = (json.loads((tmp_path / name).read_text()) for name in ("config.json", "generation_config.json"))
    ends = [tokenizer.token_to_id(END)]
    assert list(registry.resolve(config, generation).eos_token_ids) == ends
    again = load_checkpoint(tmp_path)
    prompts = torch.tensor([course.prompt(ONE)])
    for way in WAYS:
        before, after = (greedy(one, prompts, 4, way.loops, way.thresholds) for one in (model, again))
        assert torch.equal(before.tokens, after.tokens)
        assert torch.equal(before.depths, after.depths)
        assert before.depths[0, 0] == 0
        assert before.depths[0, 1:].min() >= (1 if way.thresholds else way.loops)
        assert before.depths.max() <= way.loops


@pytest.mark.parametrize(("threshold", "loops"), [(0.0, 1), (1.0, 4)])
def test_thresholds_stop_all_tokens_or_none(threshold: float, loops: int) -> None:
    tokenizer = build_tokenizer()
    model = new_model(new_config(tokenizer))
    prompts = torch.tensor([Course(tokenizer).prompt(ONE)])
    exits, plain = greedy(model, prompts, 4, 4, (threshold,) * 3), greedy(model, prompts, 4, 4)
    assert exits.depths.tolist() == [[0] + [loops] * 3]
    assert torch.equal(exits.tokens, plain.tokens) or loops == 1


def test_an_answer_is_judged_by_its_digits_and_loops() -> None:
    one, four, exits = WAYS
    for way, loops in ((one, 1.0), (four, 4.0), (exits, 1.0), (exits, 2.5), (exits, 4.0)):
        judge("52078", loops, ONE, way)
    with pytest.raises(WrongAnswer, match="47921 taken from nine is 52078, but the answer"):
        judge("52079", 1.0, ONE, one)
    for way, loops in ((one, 1.5), (four, 3.9), (exits, 4.1)):
        with pytest.raises(WrongAnswer, match="loops"):
            judge("52078", loops, ONE, way)
    assert [way.fields() for way in WAYS[:2]] == [{}, {"max_loops": 4}]
    assert exits.fields() == {"max_loops": 4, "exit_thresholds": [0.98, 0.98, 0.98]}
    assert [mean_loops(usage) for usage in ({}, {"completion_tokens_details": {"mean_loops": 2.5}})] == [1.0, 2.5]


def test_a_training_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DemoUnavailable, match="trellis demo's model ended with status 1"):
        trellis_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_training_that_learns_nothing_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"ROUNDS": ((2, 0.1), (1, 0.1)), "HELD_OUT": 4}.items():
        monkeypatch.setattr(trellis_training, name, value)
    monkeypatch.setattr(sys, "argv", ["trellis_training", str(tmp_path)])
    assert trellis_training.main() == 1
    assert "at least 95% must be" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
