"""Answers of /v1/chat/completions: their models (for the OpenAPI document) and the writer of chunks and bodies."""

from __future__ import annotations

import uuid
from typing import Any, Literal

import msgspec
from pydantic import BaseModel

from ep_runtime.frontend.api.answer import usage
from ep_runtime.frontend.api.common_schema import Usage
from ep_runtime.frontend.api.logprobs import TokenTexts, chat_entry, prompt_entries
from ep_runtime.frontend.api.streaming import sse
from ep_runtime.frontend.choice import Choice, ChoiceDelta
from ep_runtime.frontend.text.tools import ToolCallDelta


class ChatFunctionCall(BaseModel):
    """The function that the model calls; `arguments` is JSON as text."""

    name: str
    arguments: str


class ChatToolCall(BaseModel):
    """One call."""

    id: str
    type: Literal["function"]
    function: ChatFunctionCall


class ChatMessage(BaseModel):
    """The answer. `content` is null when it is tool calls alone. The reasoning comes under both of its names, or under neither."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    refusal: None = None


class ChatChoice(BaseModel):
    """One sample."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    token_loops: list[int] | None = None


class ChatCompletion(BaseModel):
    """Body of an answer that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class ChatWriter:
    """Formats one request's deltas. `top` is the number of alternatives, None for no logprobs. `looped`: several loops may run."""

    def __init__(
        self,
        *,
        head: dict[str, Any],
        texts: TokenTexts,
        prompt: list[int],
        choices: list[Choice],
        top: int | None,
        token_ids: bool,
        looped: bool,
        prompt_logprobs: bool,
        include_usage: bool,
    ) -> None:
        self._head = head
        self._texts = texts
        self._prompt = prompt
        self._choices = choices
        self._top = top
        self._token_ids = token_ids
        self._looped = looped
        self._prompt_logprobs = prompt_logprobs
        self._include_usage = include_usage
        self._parts: list[list[ChoiceDelta]] = [[] for _ in choices]
        self._plain = not token_ids and top is None
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def chunks(self, delta: ChoiceDelta) -> bytes:
        """Nothing for an update that shows nothing; the role first, once a choice."""
        if self._plain and delta.finish is None and not delta.reasoning and not delta.tool_calls:
            if not delta.content:
                return b""
            if delta.index in self._around:
                before, after = self._around[delta.index]
                return before + msgspec.json.encode(delta.content) + after
        message = delta_message(delta)
        if not message and delta.finish is None and (self._plain or not delta.token_ids):
            return b""
        return b"".join([sse(event) for event in self._events(delta, message)])

    def _events(self, delta: ChoiceDelta, message: dict[str, Any]) -> list[dict[str, Any]]:
        events = []
        if delta.index not in self._around:
            self._around[delta.index] = self._split_chunk(delta.index)
            events.append(self._chunk({"index": delta.index, "delta": {"role": "assistant", "content": ""}}))
            if self._token_ids and len(self._around) == 1:
                events[0]["prompt_token_ids"] = self._prompt
        choice: dict[str, Any] = {"index": delta.index, "delta": message, "finish_reason": delta.finish}
        if self._top is not None:
            choice["logprobs"] = self._logprobs([delta])
        if self._token_ids:
            choice |= self._tokens([delta])
        if delta.finish is not None:
            choice["stop_reason"] = delta.stop_reason
        events.append(self._chunk(choice))
        return events

    def _split_chunk(self, index: int) -> tuple[bytes, bytes]:
        """A chunk of text alone, as the bytes before and after its text: most chunks differ in nothing else."""
        mark = uuid.uuid4().hex
        before, _, after = sse(self._chunk({"index": index, "delta": {"content": mark}})).partition(f'"{mark}"'.encode())
        return before, after

    def closing(self) -> bytes:
        """The usage, when asked for."""
        if not self._include_usage:
            return b""
        counts = usage([self._prompt], self._choices, looped=self._looped)
        return sse({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": counts})

    def add(self, delta: ChoiceDelta) -> None:
        """Keep a delta for `whole`."""
        self._parts[delta.index].append(delta)

    def whole(self) -> dict[str, Any]:
        """A ChatCompletion as plain data."""
        body = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, deltas) for index, deltas in enumerate(self._parts)],
            "usage": usage([self._prompt], self._choices, looped=self._looped),
        }
        if self._token_ids:
            body["prompt_token_ids"] = self._prompt
        if self._prompt_logprobs:
            body["prompt_logprobs"] = prompt_entries(self._texts, self._prompt, self._choices[0].prompt_logprobs)
        return body

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [{"logprobs": None, "finish_reason": None, **choice}]}
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, deltas: list[ChoiceDelta]) -> dict[str, Any]:
        top = self._top or 0
        pairs = [pair for delta in deltas for pair in zip(delta.token_ids, delta.logprobs, strict=True)]
        return {"content": [chat_entry(self._texts, token, entry, top) for token, entry in pairs], "refusal": None}

    def _choice(self, index: int, deltas: list[ChoiceDelta]) -> dict[str, Any]:
        content = "".join(delta.content for delta in deltas)
        reasoning = "".join(delta.reasoning for delta in deltas)
        calls = join_calls([call for delta in deltas for call in delta.tool_calls])
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        message |= reasoning_fields(reasoning)
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": index,
            "message": message,
            "logprobs": None if self._top is None else self._logprobs(deltas),
            "finish_reason": deltas[-1].finish,
            "stop_reason": deltas[-1].stop_reason,
        }
        if self._token_ids:
            choice |= self._tokens(deltas)
        return choice

    def _tokens(self, deltas: list[ChoiceDelta]) -> dict[str, list[int]]:
        found = {"token_ids": [token for delta in deltas for token in delta.token_ids]}
        if self._looped:
            found["token_loops"] = [depth for delta in deltas for depth in delta.depths]
        return found


def delta_message(delta: ChoiceDelta) -> dict[str, Any]:
    """The `delta` object of a chunk, without its empty fields."""
    message: dict[str, Any] = {}
    if delta.content:
        message["content"] = delta.content
    message |= reasoning_fields(delta.reasoning)
    if delta.tool_calls:
        message["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    return message


def reasoning_fields(text: str) -> dict[str, str]:
    """A reasoning under vLLM's newer name and its older one, which DeepSeek and SGLang have: clients read one of them."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, **function}}


def join_calls(deltas: list[ToolCallDelta]) -> list[dict[str, Any]]:
    """Whole calls from their pieces, in order of index."""
    pieces: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        pieces.setdefault(delta.index, []).append(delta)
    return [_whole_call(pieces[index]) for index in sorted(pieces)]


def _whole_call(pieces: list[ToolCallDelta]) -> dict[str, Any]:
    function = {"name": pieces[0].name, "arguments": "".join([piece.arguments for piece in pieces])}
    return {"id": pieces[0].id, "type": "function", "function": function}
