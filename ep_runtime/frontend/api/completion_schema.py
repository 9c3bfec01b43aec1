"""Models of /v1/completions requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from ep_runtime.frontend.api.chat_schema import ResponseFormat
from ep_runtime.frontend.api.common_schema import MAX_LOGPROBS, UNSUPPORTED, SamplingFields, refuse

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
Prompt = str | list[int]

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "minItems": 1}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _TOKENS,
        {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ],
    "description": "Text, token ids, or a list of either",
}


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and 0 <= token < 2**31 for token in value)


def parse_prompts(value: Any) -> list[Prompt]:
    """The four forms of `prompt` as one list; one pass each, since a prompt may have a hundred thousand ids."""
    if isinstance(value, str) or _is_tokens(value):
        return [value]
    fits = isinstance(value, list) and 0 < len(value) <= MAX_PROMPTS
    if fits and (all(isinstance(prompt, str) for prompt in value) or all(_is_tokens(prompt) for prompt in value)):
        return value
    raise refuse("prompt", f"prompt must be text, token ids, or a list of 1 to {MAX_PROMPTS} of either")


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    unsupported: ClassVar[Mapping[str, str]] = {
        **UNSUPPORTED,
        "prompt_embeds": "give text or token ids",
        "max_completion_tokens": "use max_tokens",
    }

    prompt: Annotated[Any, PlainValidator(parse_prompts), WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description=f"{DEFAULT_MAX_TOKENS} when absent, or what remains of the context where that is less"
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    add_special_tokens: bool = Field(default=True, description="For prompts given as text")
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _refuse_completion_contradictions(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise refuse("max_tokens", "max_tokens 0 needs echo or prompt_logprobs: nothing else would be answered")
        constrained = self.response_format is not None and self.response_format.type != "text"
        if constrained and self.ignore_eos:
            raise refuse("ignore_eos", "ignore_eos contradicts an output whose grammar ends")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, each text or token ids."""
        return self.prompt
