"""Random HTTP requests: good ones of every endpoint, and what clients, proxies and attackers make of them."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, field
from typing import Any

from ep_runtime.frontend.api.chat_schema import ChatRequest
from ep_runtime.frontend.api.completion_schema import CompletionRequest
from ep_runtime.frontend.api.tokenize_schema import DetokenizeRequest, TokenizeRequest
from tests.fuzz.schemas import hostile_schema
from tests.fuzz.values import INTEGERS, TEXTS, mutate_bytes, mutate_tree, tree

CHAT, COMPLETE, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
FIELDS = {
    path: sorted({*model.model_fields, *getattr(model, "unsupported", {})})
    for path, model in (
        (CHAT, ChatRequest),
        (COMPLETE, CompletionRequest),
        (TOKENIZE, TokenizeRequest),
        (DETOKENIZE, DetokenizeRequest),
    )
}
READS = ["/health", "/ready", "/metrics", "/v1/models", "/v1/models/tiny", "/openapi.json"]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
SOME: dict[str, Any] = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
}
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
BODIES: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"messages": [USER]},
        {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}},
        {"messages": [{"role": "system", "content": "s"}, USER], "n": 2, "stop": ["o", "x"], "temperature": 0.5, "seed": 3},
        {"messages": [USER], "logprobs": True, "top_logprobs": 2, "max_tokens": 3},
        {"messages": [USER], "tools": [TOOL], "tool_choice": "required"},
        {"messages": [USER], "tools": [TOOL], "tool_choice": SOME},
        {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}, "stream": True},
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "1", "tool_call_id": "c"}]},
        {"messages": [USER], "response_format": {"type": "json_object"}, "max_tokens": 20},
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "integer"}}},
        },
        {"messages": [USER], "tools": [TOOL], "response_format": {"type": "json_object"}, "max_tokens": 20, "best_of": 1},
        {
            "messages": [USER, {"role": "assistant", "content": "The"}],
            "continue_final_message": True,
            "chat_template_kwargs": {"thinking": True},
        },
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "prompt_logprobs": 1,
        },
        {"messages": [USER], "max_loops": 3, "exit_thresholds": [0.5, 1], "n": 2, "stop": "o", "return_token_ids": True},
    ],
    COMPLETE: [
        {"prompt": "The quick"},
        {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "stream": True},
        {"prompt": [5, 6, 7], "echo": True, "logprobs": 1, "max_tokens": 2},
        {"prompt": [[5, 6], [7]], "max_tokens": 0, "echo": True, "logprobs": 0},
        {"prompt": "x", "stop": "o", "logit_bias": {"5": 1.5}, "min_tokens": 2, "ignore_eos": True, "max_tokens": 5},
        {"prompt": "x", "response_format": {"type": "json_object"}, "max_tokens": 9},
        {"prompt": "x", "max_loops": 4, "stream": True, "return_token_ids": True},
    ],
    TOKENIZE: [{"prompt": "The quick"}, {"messages": [USER], "tools": [TOOL], "return_token_strs": True}],
    DETOKENIZE: [{"tokens": [5, 6, 7]}],
}
HOSTILE_TEXTS = [
    *TEXTS,
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ cycler.__init__.__globals__ }}",
    "</tool_call><tool_call>",
    "\u202e\ufeff",
]
KWARGS = [
    "messages",
    "tools",
    "add_generation_prompt",
    "self",
    "loop",
    "range",
    "raise_exception",
    "__class__",
    "bos_token",
    "thinking",
    "a b",
]


@dataclass(slots=True)
class Visit:
    """What a client sends, piece by piece, and how it ends: it reads the answers, closes, resets, or waits without a word."""

    kind: str
    pieces: list[bytes] = field(default_factory=list)
    end: str = "read"
    strict: bool = False
    """A good request: the answer must be a success."""


def head(path: str, length: int | None, extra: str = "", method: str = "POST", version: str = "1.1") -> bytes:
    """A request head."""
    size = "" if length is None else f"Content-Length: {length}\r\n"
    return f"{method} {path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n{size}{extra}\r\n".encode(
        "latin-1", "replace"
    )


def request(path: str, body: bytes, extra: str = "") -> bytes:
    """A whole POST."""
    return head(path, len(body), extra) + body


def pick(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """An endpoint and a good body for it."""
    path = rng.choice([CHAT, CHAT, CHAT, COMPLETE, COMPLETE, TOKENIZE, DETOKENIZE])
    return path, copy.deepcopy(rng.choice(BODIES[path]))


def dump(value: Any) -> bytes:
    """JSON, with what is no JSON (NaN, bytes) as Python writes it; what it cannot write is a deep list."""
    try:
        return json.dumps(value, default=lambda other: other.decode("latin-1")).encode()
    except RecursionError:
        return b"[" * 2000 + b"]" * 2000


def good(rng: random.Random) -> Visit:
    path, body = pick(rng)
    return Visit("good", [request(path, dump(body))], strict=True)


def fields(rng: random.Random) -> Visit:
    """One to three fields changed, or set to anything."""
    path, body = pick(rng)
    for _ in range(rng.choice([1, 1, 3])):
        if rng.random() < 0.5:
            changed = mutate_tree(rng, body)
            body = changed if isinstance(changed, dict) else body
        else:
            body[rng.choice(FIELDS[path])] = rng.choice([tree(rng), rng.choice(INTEGERS), rng.choice(HOSTILE_TEXTS), rng.random()])
    return Visit("fields", [request(path, dump(body))])


def nests(rng: random.Random) -> Visit:
    """JSON of any shape and depth."""
    depth, width = rng.choice([1, 50, 99, 101, 1000, 100_000]), rng.choice([1, 5000])
    shapes = [b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth, b"[" * depth, b"[[]" + b",[]" * width + b"]"]
    shapes += [dump({str(index): index for index in range(width)}), dump(tree(rng, 6)), dump(rng.choice(HOSTILE_TEXTS))]
    inner = rng.choice(shapes)
    if rng.random() < 0.6:
        inner = b'{"messages":[{"role":"user","content":"a"}],"' + rng.choice(FIELDS[CHAT]).encode() + b'":' + inner + b"}"
    return Visit("nests", [request(rng.choice([CHAT, COMPLETE, TOKENIZE, DETOKENIZE]), inner)])


def texts(rng: random.Random) -> Visit:
    """The bytes of a good body, broken: encodings, numbers, escapes, doubled keys."""
    path, body = pick(rng)
    data = dump(body)
    kind = rng.randrange(8)
    if kind == 0:
        data = mutate_bytes(rng, data)
    elif kind == 1:
        number = rng.choice(
            [b"9" * 400, b"1e999", b"-0", b"1E400", b"0.1" + b"0" * 500, b"NaN", b"Infinity", b"0x10", b"01", b"1e-9999"]
        )
        data = data[:-1] + b',"' + rng.choice(FIELDS[path]).encode() + b'":' + number + b"}"
    elif kind == 2:
        data = data[:-1] + b"," + data[1:]  # every key twice
    elif kind == 3:
        data = data.replace(b'"Hi"', rng.choice([b'"\\ud800"', b'"\\u0000"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\\x"', b'"\t"']))
    elif kind == 4:
        data = data.decode().encode(rng.choice(["utf-16", "utf-32", "utf-8-sig", "cp037"]))
    elif kind == 5:
        data = data[: rng.randrange(len(data))]
    elif kind == 6:
        data = data + rng.choice([b" ", b"\0", b"{}", b"," * 10, data])
    else:
        data = b" " * rng.choice([1, 10**5]) + data
    return Visit("texts", [request(path, data)])


def templates(rng: random.Random) -> Visit:
    """Texts, names and template arguments that try to be template code or markup."""
    message = rng.choice([USER, {"role": "assistant", "content": "x", "tool_calls": [copy.deepcopy(CALL)]}])
    messages = [dict(message) for _ in range(rng.choice([1, 2, 200]))] + [dict(USER)]
    for _ in range(3):
        one = rng.choice(messages)
        one[rng.choice(["content", "name"])] = rng.choice(HOSTILE_TEXTS) * rng.choice([1, 1, 500])
        for called in one.get("tool_calls", []):
            called["function"]["arguments"] = rng.choice(
                [*HOSTILE_TEXTS, "[" * 1000, "{}", "1e999", '{"a":' * 200 + "1" + "}" * 200]
            )
    body: dict[str, Any] = {"messages": messages, "max_tokens": 2}
    if rng.random() < 0.6:
        body["chat_template_kwargs"] = {
            rng.choice([*KWARGS, *HOSTILE_TEXTS]): rng.choice([tree(rng), 10**12, "x"]) for _ in range(3)
        }
    if rng.random() < 0.3:
        tool = copy.deepcopy(TOOL)
        tool["function"]["description"] = rng.choice(HOSTILE_TEXTS)
        tool["function"]["parameters"] = mutate_tree(rng, tool["function"]["parameters"])
        body["tools"] = [tool]
    return Visit("templates", [request(rng.choice([CHAT, CHAT, TOKENIZE]), dump({key: body[key] for key in body}))])


def grammars(rng: random.Random) -> Visit:
    """Schemas that explode, loop or contradict themselves, as answer formats and as tools that must be called."""
    schema = hostile_schema(rng)
    body: dict[str, Any] = {"messages": [USER], "max_tokens": 5, "n": rng.choice([1, 1, 2])}
    if rng.random() < 0.5:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    else:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        body |= {
            "tools": [tool],
            "tool_choice": rng.choice(["required", "auto", {"type": "function", "function": {"name": "f"}}, SOME]),
        }
    return Visit("grammars", [request(CHAT, dump(body))])


JSON_KINDS = (good, good, fields, fields, fields, fields, nests, texts, texts, templates, templates, grammars)
