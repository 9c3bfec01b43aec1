"""Requests of looped models: what reaches the engine, what is refused, what answers, metrics and model cards say, and replays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ep_runtime.frontend.api.chat_answer import ChatCompletion
from ep_runtime.frontend.api.completion_answer import Completion
from ep_runtime.frontend.text.tokenizer import Tokenizer
from protocol.commands import Loops
from tests.http.conftest import TEXT, Stack, metric, wait_metric
from tests.http.test_errors import check_error
from tests.http.test_lifecycle import Background, MakeStack
from tests.support.fake_sequences import fake_depth

EXITS = {"max_loops": 3, "exit_thresholds": [0.5, 0.75]}
LOOPS = Loops(3, [0.5, 0.75])
COUNTER = "ep_generated_tokens_by_loops_total"


@pytest.fixture(scope="module")
def looped_stack(model: Path, tokenizer: Tokenizer) -> Iterator[Stack]:
    stack = Stack(model, tokenizer)
    stack.engine_of(1, max_loops=4)
    stack.server.wait_line("out", "ready")
    yield stack
    stack.close()


@pytest.fixture
def looped(looped_stack: Stack) -> Iterator[Stack]:
    """A model of up to four loops, served with one unless a request says otherwise."""
    looped_stack.output = TEXT
    looped_stack.engine.clear()
    yield looped_stack
    assert metric(looped_stack, "ep_journal_sequences") == 0


def depths(count: int, loops: Loops = LOOPS) -> list[int]:
    """Of a sequence's first tokens, as the fake engine has them."""
    return [fake_depth(index, loops) for index in range(count)]


def events(text: str) -> list[dict[str, Any]]:
    """A stream's events without its end mark."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("fields", "loops"),
    [
        ({}, None),
        ({"max_loops": 1}, None),
        ({"max_loops": 1, "exit_thresholds": []}, None),
        ({"exit_thresholds": []}, None),
        ({"max_loops": 4}, Loops(4)),
        ({"max_loops": 2, "exit_thresholds": [1]}, Loops(2, [1.0])),
        ({"max_loops": 2, "exit_thresholds": None}, Loops(2)),
        (EXITS, LOOPS),
    ],
)
def test_the_fields_reach_every_sample(looped: Stack, fields: dict[str, Any], loops: Loops | None) -> None:
    assert looped.chat(n=2, max_tokens=2, **fields).status_code == 200
    assert looped.complete(prompt=["a", "b"], max_tokens=2, **fields).status_code == 200
    submits = looped.engine.submits(4)
    assert [submit.sampling.loops for submit in submits] == [loops] * 4
    assert all(submit.depths == [] for submit in submits)


@pytest.mark.parametrize(
    ("fields", "loops"),
    [
        ({}, LOOPS),
        ({"exit_thresholds": []}, Loops(3)),
        ({"exit_thresholds": [0.1, 0.2]}, Loops(3, [0.1, 0.2])),
        ({"max_loops": 2}, Loops(2, [0.5])),
        ({"max_loops": 1}, None),
        ({"max_loops": 4}, Loops(4)),
        ({"max_loops": 4, "exit_thresholds": [0.1, 0.2, 0.3]}, Loops(4, [0.1, 0.2, 0.3])),
    ],
)
def test_the_servers_defaults_hold_where_a_request_is_silent(defaulted: Stack, fields: dict[str, Any], loops: Loops | None) -> None:
    defaulted.engine.clear()
    assert defaulted.chat(max_tokens=2, **fields).status_code == 200
    assert defaulted.complete(max_tokens=2, **fields).status_code == 200
    assert [submit.sampling.loops for submit in defaulted.engine.submits(2)] == [loops] * 2


@pytest.fixture(scope="module")
def defaulted(model: Path, tokenizer: Tokenizer) -> Iterator[Stack]:
    """Served with three loops and exits."""
    stack = Stack(model, tokenizer, **EXITS)
    stack.engine_of(1, max_loops=4)
    stack.server.wait_line("out", "ready")
    yield stack
    stack.close()


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_loops": 5}, "max_loops", "max_loops is 5; this model runs 1 to 4 loops"),
    ({"max_loops": 0}, "max_loops", "greater than or equal to 1"),
    ({"max_loops": 2.0}, "max_loops", "integer"),
    ({"max_loops": True}, "max_loops", "integer"),
    ({"max_loops": "2"}, "max_loops", "integer"),
    ({"max_loops": 3, "exit_thresholds": [0.5]}, "exit_thresholds", "max_loops 3 give one for each loop but the last, 2 in all"),
    ({"max_loops": 1, "exit_thresholds": [0.5]}, "exit_thresholds", "max_loops 1 give none"),
    ({"exit_thresholds": [0.5, 0.5, 0.5]}, "exit_thresholds", "with max_loops 1 (the default) give none"),
    ({"max_loops": 2, "exit_thresholds": [1.01]}, "exit_thresholds", "less than or equal to 1"),
    ({"max_loops": 2, "exit_thresholds": [-0.5]}, "exit_thresholds", "greater than or equal to 0"),
    ({"max_loops": 2, "exit_thresholds": ["0.5"]}, "exit_thresholds", "number"),
    ({"max_loops": 2, "exit_thresholds": 0.5}, "exit_thresholds", "list"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSALS, ids=lambda value: json.dumps(value)[:60])
def test_refusals_name_the_field_and_what_would_be_right(looped: Stack, fields: dict[str, Any], param: str, words: str) -> None:
    for answer in (looped.chat(**fields), looped.complete(**fields), looped.complete(stream=True, n=2, **fields)):
        error = check_error(answer, 400)
        assert error["param"].partition(".")[0] == param
        assert words in error["message"]
    assert looped.engine.received == []


@pytest.mark.parametrize("fields", [{"max_loops": 1}, {"max_loops": 2}, {"exit_thresholds": []}])
def test_a_model_without_loops_takes_neither_field(stack: Stack, fields: dict[str, Any]) -> None:
    (name,) = fields
    for answer in (stack.chat(**fields), stack.complete(**fields)):
        assert f"{name} is for looped models" in check_error(answer, 400, name)["message"]
    assert stack.engine.received == []
    assert stack.chat(max_loops=None, exit_thresholds=None, max_tokens=1).status_code == 200


def test_an_answer_tells_the_loops_of_each_token_and_their_mean(looped: Stack) -> None:
    body = looped.chat(n=2, max_tokens=6, return_token_ids=True, **EXITS).json()
    ChatCompletion.model_validate(body)
    assert [choice["token_loops"] for choice in body["choices"]] == [[0, 2, 3, 1, 2, 3]] * 2
    # The prompt's row is no token's: five of each sample's six.
    assert body["usage"]["completion_tokens_details"] == {"mean_loops": (2 + 3 + 1 + 2 + 3) / 5}
    body = looped.complete(prompt=["a", "b"], max_tokens=3, return_token_ids=True, max_loops=4).json()
    Completion.model_validate(body)
    assert [choice["token_loops"] for choice in body["choices"]] == [[0, 4, 4]] * 2
    assert body["usage"]["completion_tokens_details"] == {"mean_loops": 4.0}
    body = looped.chat(max_tokens=3, **EXITS).json()
    assert "token_loops" not in body["choices"][0]
    assert body["usage"]["completion_tokens_details"] == {"mean_loops": 2.5}


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"max_tokens": 0, "echo": True}])
def test_no_mean_where_the_prompt_alone_was_computed(looped: Stack, fields: dict[str, Any]) -> None:
    body = looped.complete(return_token_ids=True, **fields, **EXITS).json()
    assert body["usage"]["completion_tokens_details"] == {"mean_loops": None}
    assert body["choices"][0]["token_loops"] == [0] * fields["max_tokens"]


def test_one_loop_is_not_spoken_of(looped: Stack) -> None:
    for answer in (looped.chat(return_token_ids=True), looped.complete(return_token_ids=True, max_loops=1)):
        body = answer.json()
        assert "completion_tokens_details" not in body["usage"]
        assert "token_loops" not in body["choices"][0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_loops_pair_with_tokens_in_a_stream_up_to_a_stop_string(looped: Stack, path: str) -> None:
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi", "max_tokens": 99}
    )
    body = {**prompt, **EXITS, "n": 2, "stop": "over", "return_token_ids": True}
    whole = looped.http.post(path, json=body).json()
    streamed = events(looped.http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}}).text)
    assert streamed.pop()["usage"] == whole["usage"]
    expected = looped.tokenizer.encode(TEXT[: TEXT.index("over") + 4], False)
    for index in range(2):
        pieces = [event["choices"][0] for event in streamed if event["choices"][0]["index"] == index]
        shown = [piece for piece in pieces if "token_ids" in piece]
        assert all(len(piece["token_ids"]) == len(piece["token_loops"]) for piece in shown)
        ids = [token for piece in shown for token in piece["token_ids"]]
        assert ids == expected == whole["choices"][index]["token_ids"]
        assert (
            [loops for piece in shown for loops in piece["token_loops"]]
            == depths(len(ids))
            == whole["choices"][index]["token_loops"]
        )


def test_a_replay_sends_the_loops_of_every_token(make_stack: MakeStack) -> None:
    stack = make_stack()
    first = stack.engine_of(1, held=True, max_loops=4)
    stack.server.wait_line("out", "ready")
    ran = Background(lambda: stack.chat(n=2, return_token_ids=True, **EXITS))
    first.submits(2)
    plain = Background(lambda: stack.chat(return_token_ids=True))
    first.submits(3)
    first.step(5)
    wait_metric(stack, "ep_generated_tokens_total", lambda value: value == 15)
    first.stop()
    again = stack.engine_of(2, max_loops=4).submits(3)
    assert [submit.depths for submit in again] == [depths(5), depths(5), []]
    assert all(submit.generated == stack.tokenizer.encode(TEXT, False)[:5] for submit in again)
    for choice in ran.result().json()["choices"]:
        assert choice["message"]["content"] == TEXT
        assert choice["token_loops"] == depths(len(choice["token_ids"]))
    assert plain.result().json()["choices"][0]["message"]["content"] == TEXT


def test_tokens_are_counted_by_loops(looped: Stack) -> None:
    def counts() -> dict[str, float]:
        return {label: metric(looped, f'{COUNTER}{{loops="{label}"}}') for label in ("prompt", "1", "2", "3", "4")}

    before, total = counts(), metric(looped, "ep_generated_tokens_total")
    looped.chat(n=2, max_tokens=6, **EXITS)
    looped.chat(max_tokens=5)
    after = counts()
    assert {label: after[label] - before[label] for label in after} == {"prompt": 2, "1": 2 + 5, "2": 4, "3": 4, "4": 0}
    assert sum(after.values()) - sum(before.values()) == metric(looped, "ep_generated_tokens_total") - total == 17


def test_models_and_metrics_speak_of_loops_where_there_are_any(looped: Stack, stack: Stack) -> None:
    assert looped.http.get("/v1/models").json()["data"][0]["max_loops"] == 4
    assert looped.http.get("/v1/models/tiny").json()["max_loops"] == 4
    assert "max_loops" not in stack.http.get("/v1/models/tiny").json()
    assert COUNTER.removesuffix("_total") not in stack.http.get("/metrics").text
