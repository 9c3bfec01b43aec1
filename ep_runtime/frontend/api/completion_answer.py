"""Answers of /v1/completions: their models (for the OpenAPI document) and the writer of chunks and bodies."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from pydantic import BaseModel

from ep_runtime.frontend.api.answer import usage
from ep_runtime.frontend.api.common_schema import Usage
from ep_runtime.frontend.api.logprobs import CompletionLogprobs, TokenTexts, prompt_entries
from ep_runtime.frontend.api.streaming import sse
from ep_runtime.frontend.choice import Choice, ChoiceDelta


class CompletionChoice(BaseModel):
    """One sample of one prompt; choices are ordered by prompt, then sample."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    token_loops: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(BaseModel):
    """Body of an answer that is not streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


@dataclass(slots=True)
class _Sample:
    """What was written of one choice."""

    prompt: list[int]
    echo: str
    logprobs: CompletionLogprobs | None
    begun: bool = False
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None


class CompletionWriter:
    """Formats one request's deltas. `prompts` are (ids, text to echo or ""); `samples` is n; `silent` drops generated tokens.

    `looped`: several loops may run.
    """

    def __init__(
        self,
        *,
        head: dict[str, Any],
        texts: TokenTexts,
        prompts: list[tuple[list[int], str]],
        choices: list[Choice],
        samples: int,
        top: int | None,
        echo: bool,
        silent: bool,
        token_ids: bool,
        looped: bool,
        prompt_logprobs: bool,
        include_usage: bool,
    ) -> None:
        self._head = {**head, "object": "text_completion"}
        self._texts = texts
        self._prompts = [ids for ids, _ in prompts]
        self._choices = choices
        self._samples = [
            _Sample(ids, text, None if top is None else CompletionLogprobs(texts, top))
            for ids, text in prompts
            for _ in range(samples)
        ]
        self._echo = echo
        self._silent = silent
        self._token_ids = token_ids
        self._looped = looped
        self._prompt_logprobs = prompt_logprobs
        self._include_usage = include_usage
        self._plain = not token_ids and top is None and not silent
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def chunks(self, delta: ChoiceDelta) -> bytes:
        """Nothing for an update that shows nothing."""
        if not (delta.content or delta.finish or (delta.token_ids and not self._plain)):
            return b""
        sample = self._samples[delta.index]
        fresh = not sample.begun
        if self._plain and delta.finish is None and not fresh:
            if delta.index not in self._around:
                self._around[delta.index] = self._split_chunk(delta.index)
            before, after = self._around[delta.index]
            return before + msgspec.json.encode(delta.content) + after
        self.add(delta)
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": "".join(sample.text),
            "logprobs": None if sample.logprobs is None else sample.logprobs.take(),
            "finish_reason": delta.finish,
        }
        if self._token_ids:
            choice |= self._tokens(sample)
            if fresh:
                choice["prompt_token_ids"] = sample.prompt
        if delta.finish is not None:
            choice["stop_reason"] = delta.stop_reason
        sample.text, sample.token_ids, sample.depths = [], [], []
        return sse(self._chunk(choice))

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _split_chunk(self, index: int) -> tuple[bytes, bytes]:
        """A chunk of text alone, as the bytes before and after its text: most chunks differ in nothing else."""
        mark = uuid.uuid4().hex
        choice = {"index": index, "text": mark, "logprobs": None, "finish_reason": None}
        before, _, after = sse(self._chunk(choice)).partition(f'"{mark}"'.encode())
        return before, after

    def closing(self) -> bytes:
        """The usage, when asked for."""
        return sse({**self._head, "choices": [], "usage": self._usage()}) if self._include_usage else b""

    def add(self, delta: ChoiceDelta) -> None:
        """Write a delta into its sample; the echoed prompt comes before the first one."""
        sample = self._samples[delta.index]
        if not sample.begun and (delta.token_ids or delta.finish):
            sample.begun = True
            self._begin(sample, self._choices[delta.index])
        if not self._silent:
            sample.text.append(delta.content)
            sample.token_ids.extend(delta.token_ids)
            sample.depths.extend(delta.depths)
            if sample.logprobs is not None:
                for token, entry in zip(delta.token_ids, delta.logprobs, strict=True):
                    sample.logprobs.add(token, entry)
        if delta.finish is not None:
            sample.finish = "length" if self._silent else delta.finish
            sample.stop_reason = None if self._silent else delta.stop_reason

    def _begin(self, sample: _Sample, choice: Choice) -> None:
        if not self._echo:
            return
        sample.text.append(sample.echo)
        if sample.logprobs is not None:
            for position, token in enumerate(sample.prompt):
                sample.logprobs.add(token, choice.prompt_logprobs.get(position))

    def whole(self) -> dict[str, Any]:
        """A Completion as plain data."""
        choices = [self._choice(index, sample) for index, sample in enumerate(self._samples)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _choice(self, index: int, sample: _Sample) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": "".join(sample.text),
            "logprobs": None if sample.logprobs is None else sample.logprobs.take(),
            "finish_reason": sample.finish,
            "stop_reason": sample.stop_reason,
        }
        if self._token_ids:
            choice["prompt_token_ids"] = sample.prompt
            choice |= self._tokens(sample)
        if self._prompt_logprobs:
            choice["prompt_logprobs"] = prompt_entries(self._texts, sample.prompt, self._choices[index].prompt_logprobs)
        return choice

    def _tokens(self, sample: _Sample) -> dict[str, list[int]]:
        return {"token_ids": sample.token_ids, **({"token_loops": sample.depths} if self._looped else {})}

    def _usage(self) -> dict[str, Any]:
        counts = usage(self._prompts, self._choices, looped=self._looped)
        if self._silent:
            counts["completion_tokens"], counts["total_tokens"] = 0, counts["prompt_tokens"]
        return counts
