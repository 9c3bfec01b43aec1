"""Sampling defaults of the model's folder, and one compilation for all samples of a request."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ep_runtime.frontend.api.chat import make_grammars
from ep_runtime.frontend.api.chat_schema import ChatRequest
from ep_runtime.frontend.config import FrontendConfig
from ep_runtime.frontend.defaults import SamplingDefaults, load_defaults, sampling_defaults
from ep_runtime.frontend.text.errors import TextError
from ep_runtime.frontend.text.grammar import GrammarFactory
from ep_runtime.frontend.text_stack import RenderedPrompt, TextStack
from tests.http.test_lifecycle import MakeStack

CARD = {"do_sample": True, "temperature": 0.2, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, {}),
        ({"eos_token_id": 2, "transformers_version": "5"}, {}),
        ({"temperature": None, "top_k": None}, {}),
        (CARD, {name: value for name, value in CARD.items() if name != "do_sample"}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"temperature": 1, "max_new_tokens": 9}, {"temperature": 1.0, "max_new_tokens": 9}),
    ],
)
def test_defaults_of_a_folder(found: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    assert sampling_defaults(found) == SamplingDefaults(**expected)


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 0}, {"top_k": 1.5}, {"max_new_tokens": 0}, {"min_p": "x"}])
def test_a_bad_file_is_refused_by_name_and_may_be_ignored(tmp_path: Path, bad: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(bad))
    with pytest.raises(TextError, match=rf"generation_config\.json: {next(iter(bad))}: "):
        load_defaults(tmp_path, True)
    assert load_defaults(tmp_path, False) == SamplingDefaults()


@pytest.fixture(scope="module")
def card_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card") / "model"
    shutil.copytree(model, folder)
    path = folder / "generation_config.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**found, **CARD, "max_new_tokens": 5}))
    return folder


def test_what_a_request_does_not_say_comes_from_the_model(make_stack: MakeStack, card_model: Path) -> None:
    stack = make_stack(model=card_model)
    engine = stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    assert "temperature 0.2, top_k 40, top_p 0.9, min_p 0.05, repetition_penalty 1.1, max_new_tokens 5" in "\n".join(
        stack.server.err
    )
    assert stack.chat().json()["usage"]["completion_tokens"] == 5
    assert stack.complete().status_code == 200
    given = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert stack.chat(max_tokens=7, **given).status_code == 200
    silent, completion, told = (submit.sampling for submit in engine.submits(3))
    for sampling in (silent, completion):
        assert {name: getattr(sampling, name) for name in given} == {name: CARD[name] for name in given}
        assert sampling.max_tokens == 5
    assert {name: getattr(told, name) for name in given} == given
    assert told.max_tokens == 7


def test_they_can_be_switched_off(make_stack: MakeStack, card_model: Path) -> None:
    stack = make_stack(model=card_model, generation_config="none")
    engine = stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    assert stack.chat().status_code == 200
    sampling = engine.submits(1)[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (1.0, 0, 1.0, 1.0)
    assert sampling.max_tokens > 5


def test_samples_share_one_compilation_and_nothing_else(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    original = GrammarFactory.json_schema
    monkeypatch.setattr(GrammarFactory, "json_schema", lambda self, schema: compiled.append(schema) or original(self, schema))
    stack = TextStack.load(FrontendConfig(model=str(model), runtime_dir="/tmp", served_model_name=("m",)))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "n": 4, "response_format": form})
    found = asyncio.run(make_grammars(SimpleNamespace(text=stack), body, RenderedPrompt("x", [1])))
    stack.close()
    assert compiled == [schema]
    assert len(found) == 4
    (first, start), *others = found
    for token in stack.tokenizer.encode('{"a":', False):
        assert first.accept(token)
    assert first.mask() != start
    assert all((source.mask(), mask) == (start, start) for source, mask in others)
