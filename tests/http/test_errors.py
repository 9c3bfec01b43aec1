"""Every refusal: its status, OpenAI's format, and the field it names."""

from __future__ import annotations

import json
import random
import socket
from typing import Any

import openai
import pytest

from ep_runtime.frontend.api.chat_schema import ChatRequest
from ep_runtime.frontend.api.common_schema import RequestBody
from ep_runtime.frontend.api.completion_schema import CompletionRequest
from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.api.strict_json import MOST_SEARCHED, has_lone_surrogate, parse_json
from ep_runtime.frontend.api.tokenize_schema import TokenizeRequest
from tests.http.conftest import Stack

USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
LIST_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "list"}}}
FORCED = {"type": "function", "function": {"name": "g"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}
JSON = {"type": "json_object"}
MARK = "messages.0.content.0.cache_control"


def some_of(*tools: dict[str, Any], mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


CHAT_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{}]}, "messages.0.role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages.0.mood"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"temprature": 1}, "temprature"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 100}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"max_tokens": 10_000}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stop": [""]}, "stop.0"),
    ({"stop": 4}, "stop"),
    ({"stop_token_ids": [100_000]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"seed": 2**63}, "seed"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": FORCED}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [TOOL], "tool_choice": some_of(TOOL, mode="none")}, "tool_choice.allowed_tools.mode"),
    ({"tools": [TOOL], "tool_choice": some_of()}, "tool_choice.allowed_tools.tools"),
    ({"tools": [TOOL], "tool_choice": some_of(TOOL, FORCED)}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": some_of(TOOL), "ignore_eos": True}, "ignore_eos"),
    ({"tools": [LIST_TOOL], "tool_choice": some_of(TOOL)}, "tools"),
    ({"tool_choice": some_of(TOOL)}, "tool_choice"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": 5}]}]}, MARK),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "list"}}}], "response_format": JSON},
        "response_format",
    ),
    ({"response_format": SCHEMA}, "response_format"),
    ({"response_format": JSON, "ignore_eos": True}, "ignore_eos"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "messages"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"functions": [TOOL["function"]]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"echo": True}, "echo"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 1.1}, "length_penalty"),
    ({"early_stopping": "never"}, "early_stopping"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"guided_json": {}}, "guided_json"),
    ({"extra_body": {"top_k": 1}}, "extra_body"),
    ({"enable_thinking": False}, "enable_thinking"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ({"messages": [*USER, {"role": "assistant", "reasoning": "a", "reasoning_content": "b"}]}, "messages.1.reasoning"),
]

COMPLETION_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [399_999]}, "prompt"),
    ({"prompt": [1] * 512}, "prompt"),
    ({"prompt": [1] * 510, "max_tokens": 3}, "max_tokens"),
    ({"prompt": ["a"] * 17}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"max_completion_tokens": 2}, "max_completion_tokens"),
    ({"messages": USER}, "messages"),
]


def check_error(answer: Any, status: int, param: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    if param is not None:
        assert body["error"]["param"] == param, body
    return body["error"]


@pytest.mark.parametrize(("fields", "param"), CHAT_REFUSALS, ids=lambda value: json.dumps(value)[:60])
def test_chat_refusals_name_the_field(stack: Stack, fields: dict[str, Any], param: str) -> None:
    message = check_error(stack.chat(**fields), 400, param)["message"]
    assert "must be a JSON object" not in message
    assert stack.engine.received == []


@pytest.mark.parametrize(("fields", "param"), COMPLETION_REFUSALS, ids=lambda value: json.dumps(value)[:60])
def test_completion_refusals_name_the_field(stack: Stack, fields: dict[str, Any], param: str) -> None:
    message = check_error(stack.complete(**fields), 400, param)["message"]
    assert "must be a JSON object" not in message
    assert stack.engine.received == []


@pytest.mark.parametrize("body", [{"n": 0}, {"n": 129}, {"temperature": 3}, {"messages": [{}]}, {"messages": [{"role": "user"}]}])
def test_a_refusal_says_the_fields_name(stack: Stack, body: dict[str, Any]) -> None:
    error = check_error(stack.chat(**body), 400)
    assert error["message"].startswith(f"{error['param']}: ")
    assert "discriminator" not in error["message"]


@pytest.mark.parametrize("body", [b"", b"[]", b"null"])
def test_a_body_that_is_no_object(stack: Stack, body: bytes) -> None:
    answer = stack.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert check_error(answer, 400)["message"] == "The body must be a JSON object"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_a_model_that_is_not_served(stack: Stack, path: str) -> None:
    fields = {"messages": USER} if "chat" in path else {"tokens": [1]} if "detokenize" in path else {"prompt": "a"}
    error = check_error(stack.http.post(path, json={**fields, "model": "other"}), 404, "model")
    assert error["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="tiny"):
        stack.client().chat.completions.create(model="other", messages=[{"role": "user", "content": "Hi"}])


def optional_fields(model: type[RequestBody]) -> list[str]:
    return [name for name, field in model.model_fields.items() if not field.is_required()]


@pytest.mark.parametrize(("body", "fields"), [(ChatRequest, {"messages": USER}), (CompletionRequest, {"prompt": "a"})])
def test_null_is_as_absent(stack: Stack, body: type[RequestBody], fields: dict[str, Any]) -> None:
    nulls = dict.fromkeys(optional_fields(body))
    assert {"n", "stream", "min_tokens", "ignore_eos", "seed"} <= set(nulls)
    assert body.model_validate({**nulls, **fields}) == body.model_validate(fields)
    unknown = stack.complete(temprature=None) if "prompt" in fields else stack.chat(temprature=None)
    check_error(unknown, 400, "temprature")


def test_openai_client_may_send_none(stack: Stack) -> None:
    stack.output = "Hi"
    chat = stack.client().chat.completions
    answer = chat.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], n=None, stream=None, logit_bias=None)
    assert answer.choices[0].message.content == "Hi"


def test_the_declared_fields_may_be_null(stack: Stack) -> None:
    declared = stack.http.get("/openapi.json").json()["components"]["schemas"]
    for model in (ChatRequest, CompletionRequest, TokenizeRequest):
        for name in optional_fields(model):
            assert {"type": "null"} in declared[model.__name__]["properties"][name]["anyOf"], name
    assert "anyOf" not in declared["ChatRequest"]["properties"]["messages"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00x"}',
        b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b"\x00\x01\x02",
    ],
    ids=lambda body: repr(body[:40]),
)
def test_bad_json(stack: Stack, body: bytes) -> None:
    check_error(stack.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}), 400)


@pytest.mark.parametrize("text", ["\\ud800", "a\\udfffb", "\\ud83d\\ud83d\\ude00", "\\\\\\ud800 and more text"])
def test_a_lone_surrogate_is_called_by_its_name(stack: Stack, text: str) -> None:
    body = f'{{"prompt": "{text}"}}'.encode()
    error = check_error(stack.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}), 400)
    assert "lone surrogate" in error["message"]


@pytest.mark.parametrize("text", ['{"prompt": "a\\\\ud800', '{"prompt": "\\ud83d\\ude00\\u0041', '{"prompt": "'])
def test_what_is_cut_off_has_no_lone_surrogate(stack: Stack, text: str) -> None:
    answer = stack.http.post("/v1/completions", content=text.encode(), headers={"Content-Type": "application/json"})
    assert check_error(answer, 400)["message"] == "The body is not valid JSON: Input data was truncated"


def test_lone_surrogates_are_those_that_python_does_not_encode() -> None:
    """Random strings of escapes: the reference is the JSON module's, whose result UTF-8 takes unless a half of a pair is left."""
    rng = random.Random(5)
    units = ["\\ud83d", "\\uDBFF", "\\ude00", "\\uDFFF", "\\u0041", "\\\\", "\\n", "u", "d800", " "]
    counts = {True: 0, False: 0}
    for _ in range(4000):
        body = f'"{"".join(rng.choices(units, k=rng.randrange(6)))}"'
        try:
            json.loads(body).encode()
            lone = False
        except UnicodeEncodeError:
            lone = True
        assert has_lone_surrogate(body.encode()) == lone, body
        counts[lone] += 1
    assert min(counts.values()) > 1000


def test_a_lone_surrogate_is_not_looked_for_in_a_large_body() -> None:
    """That would hold up every stream."""
    with pytest.raises(ApiError) as refused:
        parse_json(b'"%b\\ud800"' % (b"\\n" * MOST_SEARCHED))
    assert refused.value.message.startswith("The body is not valid JSON: ")
    assert "lone" not in refused.value.message


def test_context_limit_exactly(stack: Stack) -> None:
    assert stack.complete(prompt=[40] * 511, max_tokens=1).status_code == 200
    error = check_error(stack.complete(prompt=[40] * 511, max_tokens=2), 400)
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    assert "511" in error["message"]
    assert check_error(stack.complete(prompt=[40] * 512), 400)["code"] == "context_length_exceeded"
    # Absent, the limit is what remains, or 16 where that is less.
    assert stack.complete(prompt=[40] * 509).status_code == 200
    assert stack.engine.submits(2)[1].sampling.max_tokens == 3


def test_wrong_content_type(stack: Stack) -> None:
    check_error(stack.http.post("/v1/completions", data={"prompt": "a"}), 415)
    check_error(stack.http.post("/v1/completions", content=b'{"prompt": "a"}'), 415)


def test_unknown_path_and_method(stack: Stack) -> None:
    check_error(stack.http.get("/v1/engines"), 404)
    check_error(stack.http.post("/v1/chat/completions/", json={}), 404)
    answer = stack.http.get("/v1/chat/completions")
    check_error(answer, 405)
    assert "POST" in answer.headers["allow"]


def test_template_may_refuse(stack: Stack) -> None:
    error = check_error(stack.chat(messages=[{"role": "user", "content": "x", "name": "mallory"}]), 400, "messages")
    assert "no word from mallory" in error["message"]


def test_body_over_the_limit(stack: Stack) -> None:
    text = "a" * (16 * 2**20)
    check_error(stack.http.post("/v1/completions", json={"prompt": text}), 413)


def test_chunked_body_over_the_limit_is_refused_while_it_comes(stack: Stack) -> None:
    host, port = stack.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        sock.sendall(head.encode())
        chunk = b"100000\r\n" + b"a" * 2**20 + b"\r\n"
        # Never the last chunk: the answer must come before the body ends.
        for _ in range(17):
            sock.sendall(chunk)
        assert sock.recv(4096).startswith(b"HTTP/1.1 413")


def test_official_client_raises_its_own_errors(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        stack.client().chat.completions.create(model="tiny", messages=USER, max_tokens=100_000)
    assert caught.value.code == "context_length_exceeded"
