"""What requests of both generation endpoints share: strict models, sampling fields, usage, token limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

MAX_STOPS = 16
MAX_LOGPROBS = 20
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]


def refuse(param: str, message: str) -> PydanticCustomError:
    """A validation error that names `param` itself. Braces in texts of ours would be taken for format fields."""
    return PydanticCustomError("refused", "{reason}", {"param": param, "reason": message})


class StrictModel(BaseModel):
    """No unknown fields, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)


class CacheHint(StrictModel):
    """What clients of Anthropic's API mark as worth caching. It is no part of the data: nothing that is dumped has it."""

    cache_control: dict[str, Any] | None = Field(default=None, exclude=True, description="Accepted and not used")


def _declare_null(schema: dict[str, Any]) -> None:
    """Let the JSON schema say of every field that may be absent that it may be null."""
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
            value = {key: field.pop(key) for key in list(field) if key not in ("title", "description", "default")}
            field["anyOf"] = [value, {"type": "null"}]


class RequestBody(StrictModel):
    """A request's body, in whose optional fields null is the same as absent: OpenAI declares many so, and its client sends None."""

    model_config = ConfigDict(json_schema_extra=_declare_null)

    @model_validator(mode="before")
    @classmethod
    def _forget_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {key: value for key, value in data.items() if value is not None or key not in optional}


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "echo": (False,),
    "documents": ([],),
    "include_reasoning": (True,),
    "mm_processor_kwargs": ({},),
}
"""Values of unsupported fields that ask for what is done anyway: defaults of OpenAI and vLLM, which some clients always send."""

UNSUPPORTED = {
    "best_of": "ask for n and choose",
    "suffix": "the model does not fill in",
    "use_beam_search": "sampling is the only search",
    "length_penalty": "sampling is the only search",
    "early_stopping": "sampling is the only search",
    "bad_words": "use logit_bias",
    "allowed_token_ids": "use logit_bias or response_format",
    "logits_processors": "the server runs no code of a request",
    "return_tokens_as_token_ids": "use return_token_ids",
    "truncate_prompt_tokens": "a prompt that is too long is refused, not cut",
    "guided_json": "use response_format",
    "guided_regex": "use response_format with a schema that has a pattern",
    "guided_choice": "use response_format with a schema that has an enum",
    "guided_grammar": "use response_format",
    "structured_outputs": "use response_format",
    "request_id": "the server names its requests, in the answer's id and X-Request-Id",
    "cache_salt": "the prefix cache is not divided",
    "extra_body": "put its fields into the body itself, as OpenAI's client does",
}
"""Fields of both generation endpoints at OpenAI or vLLM that are refused, and why or what to use."""


def is_neutral(name: str, value: object) -> bool:
    """True when this value of an unsupported field changes nothing. A boolean is not taken for a number."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in NEUTRAL.get(name, ()))


class StreamOptions(StrictModel):
    """What a stream carries beside its choices."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(default=None, description="Accepted; nothing is obfuscated")
    continuous_usage_stats: bool | None = Field(default=None, description="true is refused: usage comes in the last event")

    @field_validator("continuous_usage_stats")
    @classmethod
    def _usage_comes_last(cls, value: bool | None) -> bool | None:
        if value:
            raise refuse("stream_options", "continuous_usage_stats is not supported: usage comes in the stream's last event")
        return value


class SamplingFields(RequestBody):
    """How tokens are chosen and when they end, by OpenAI's names and vLLM's."""

    unsupported: ClassVar[Mapping[str, str]] = UNSUPPORTED

    model: str | None = Field(default=None, description="A served name; the server's own when absent")
    n: int = Field(default=1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(default=None, description="0 and -1 are off")
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=128)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, le=2**31 - 1)
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = Field(default=True, description="Accepted and not used: none are written")
    priority: int = Field(default=0, ge=-(2**31), le=2**31 - 1, description="Lower runs first")
    max_loops: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        default=None, description="Most loops that a token runs, for looped models; the server's default when absent"
    )
    exit_thresholds: Annotated[list[Annotated[Finite, Field(ge=0, le=1)]], Field(fail_fast=True, max_length=128)] | None = Field(
        default=None,
        description="For looped models, one for each loop but the last: a token stops there when its exit score reaches it",
    )

    user: str | None = Field(default=None, description="Accepted and not used")
    metadata: dict[str, Any] | None = Field(default=None, description="Accepted and not used")
    store: bool | None = Field(default=None, description="Accepted; nothing is stored")
    service_tier: str | None = Field(default=None, description="Accepted and not used")
    safety_identifier: str | None = Field(default=None, description="Accepted and not used")
    prompt_cache_key: str | None = Field(default=None, description="Accepted and not used")
    prompt_cache_retention: str | None = Field(default=None, description="Accepted and not used")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, reason in cls.unsupported.items():
                if data.get(name) is not None and not is_neutral(name, data[name]):
                    raise refuse(name, f"{name} is not supported: {reason}")
            return {key: value for key, value in data.items() if key not in cls.unsupported}
        return data

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "stream_options is only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise refuse("prompt_logprobs", "prompt_logprobs is not available when stream is true")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class PromptTokensDetails(BaseModel):
    """Part of the prompt that was found in the prefix tree."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Loops that generated tokens ran on average; null when none was generated after the first of each sample."""

    mean_loops: float | None


class Usage(BaseModel):
    """Tokens of a request. `completion_tokens_details` is there when more than one loop was allowed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
