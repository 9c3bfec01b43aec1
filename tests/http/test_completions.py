"""/v1/completions, /tokenize, /detokenize and /v1/models."""

from __future__ import annotations

import json

import pytest

from tests.http.conftest import TEXT, Stack


def test_text_prompt(stack: Stack) -> None:
    answer = stack.client().completions.create(model="tiny", prompt="The quick", max_tokens=100)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert stack.engine.submits(1)[0].prompt == stack.tokenizer.encode("The quick")


def test_default_is_sixteen_tokens(stack: Stack) -> None:
    choice = stack.complete().json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert stack.engine.submits(1)[0].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["The", "Paris"], ["The", "Paris"]),
    ],
    ids=["ids", "lists of ids", "texts"],
)
def test_prompt_forms(stack: Stack, prompt: list, expected: list) -> None:
    answer = stack.client().completions.create(model="tiny", prompt=prompt, max_tokens=2, n=2, seed=3)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    submits = stack.engine.submits(2 * len(expected))
    ids = [stack.tokenizer.encode(one) if isinstance(one, str) else one for one in expected]
    assert [submit.prompt for submit in submits] == [one for one in ids for _ in range(2)]
    assert [submit.sampling.seed for submit in submits] == [submit.sampling.seed for submit in submits[:2]] * len(expected)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert answer.usage.completion_tokens == 4 * len(expected)


def test_stream(stack: Stack) -> None:
    chunks = list(
        stack.client().completions.create(
            model="tiny", prompt="The", max_tokens=100, stream=True, echo=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "The" + TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


def test_echo_with_logprobs(stack: Stack) -> None:
    choice = stack.complete(prompt="The quick", echo=True, logprobs=2, max_tokens=2, return_token_ids=True).json()["choices"][0]
    ids = stack.tokenizer.encode("The quick")
    assert choice["text"].startswith("The quick")
    assert choice["prompt_token_ids"] == ids
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [None, *[-0.25] * (len(ids) + 1)]
    assert logprobs["text_offset"][0] == 0
    assert [choice["text"][start:] for start in logprobs["text_offset"]][-1] == logprobs["tokens"][-1]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(row) == 2 for row in logprobs["top_logprobs"][1:])
    assert stack.engine.submits(1)[0].sampling.prompt_logprobs == 2


def test_echo_alone_scores_the_prompt(stack: Stack) -> None:
    body = stack.complete(prompt="The quick", echo=True, logprobs=0, max_tokens=0).json()
    assert body["choices"][0]["text"] == "The quick"
    assert body["choices"][0]["finish_reason"] == "length"
    assert len(body["choices"][0]["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 0


def test_streamed_echo_with_logprobs(stack: Stack) -> None:
    chunks = list(
        stack.client().completions.create(model="tiny", prompt="The quick", max_tokens=3, stream=True, echo=True, logprobs=1)
    )
    tokens = [token for chunk in chunks for token in (chunk.choices[0].logprobs.tokens or [])]
    assert "".join(tokens) == "".join(chunk.choices[0].text for chunk in chunks)
    offsets = [offset for chunk in chunks for offset in (chunk.choices[0].logprobs.text_offset or [])]
    assert offsets == sorted(offsets)


def test_json_schema(stack: Stack) -> None:
    stack.output = [stack.eos]
    body = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 7}}}
    assert stack.complete(response_format=body).json()["choices"][0]["text"].strip() == "7"


def test_models(stack: Stack) -> None:
    client = stack.client()
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    missing = stack.http.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_tokenize_round_trip(stack: Stack) -> None:
    ids = stack.tokenizer.encode("Paris 日本")
    body = stack.http.post("/tokenize", json={"prompt": "Paris 日本", "return_token_strs": True}).json()
    assert body["tokens"] == ids
    assert body["count"] == len(ids)
    assert body["max_model_len"] == 512
    assert body["token_strs"] == [stack.tokenizer.token_text(token) for token in ids]
    assert stack.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Paris 日本"}


def test_tokenize_messages(stack: Stack) -> None:
    body = stack.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    text = stack.http.post("/detokenize", json={"tokens": body["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_chunk_of_a_stream_has_the_same_fields(stack: Stack, path: str, usage: bool) -> None:
    fields = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    stack.output = 'a "quoted" \\ text\n\twith é, 日本 and \u2028 in it'
    body = {**fields, "stream": True, "n": 2, "max_tokens": 100, "stream_options": {"include_usage": usage}}
    lines = [line for line in stack.http.post(path, json=body).text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    shown = [chunk for chunk in chunks if chunk["choices"]]
    assert len(chunks) - len(shown) == usage
    assert len({tuple(sorted(chunk)) for chunk in chunks}) == 1
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in shown]
    assert {frozenset(choice) - {"stop_reason"} for choice in choices} == {frozenset(choices[1]) - {"stop_reason"}}
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["delta"].get("content", "") if "chat" in path else choice["text"] for choice in own) == stack.output
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
