"""From request fields to SamplingParams: seeds of n samples, limits on tokens, validated biases. Pure functions."""

from __future__ import annotations

import hashlib
import secrets
import struct
from typing import TypeVar

from ep_runtime.frontend.api.common_schema import SamplingFields
from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.defaults import SamplingDefaults
from protocol.commands import Loops
from protocol.messages import SamplingParams

T = TypeVar("T")


def draw_seed() -> int:
    """A seed for a request that gives none, 63 bits."""
    return secrets.randbits(63)


def derive_seed(seed: int, sample: int) -> int:
    """Seed of sample `sample` of a request, 63 bits: blake2b (8 bytes, person "ep-sample") of little-endian (i64 seed, u32 sample),
    read as a little-endian u64 and shifted right by one.
    """
    digest = hashlib.blake2b(struct.pack("<qI", seed, sample), digest_size=8, person=b"ep-sample").digest()
    return int(struct.unpack("<Q", digest)[0]) >> 1


def token_budget(prompt_len: int, asked: int | None, max_model_len: int, default: int | None = None) -> int:
    """How many tokens to generate: what was asked, else `default` or less, else all that remains.

    Raises ApiError 400 context_length_exceeded when the prompt leaves no room or `asked` does not fit.
    """
    remaining = max_model_len - prompt_len
    if remaining < 1 or (asked is not None and asked > remaining):
        raise _too_long(str(prompt_len), asked, max_model_len, "max_tokens" if remaining >= 1 else "prompt")
    if asked is not None:
        return asked
    return remaining if default is None else min(default, remaining)


def check_least(least: int, asked: int | None, max_model_len: int) -> None:
    """Raise ApiError 400 context_length_exceeded when a prompt of `least` tokens or more leaves no room in any case."""
    if least >= max_model_len:
        raise _too_long(f"at least {least}", asked, max_model_len, "prompt")


def _too_long(prompt_len: str, asked: int | None, max_model_len: int, param: str) -> ApiError:
    wanted = "" if asked is None else f" and {asked} tokens to generate"
    text = f"This model's maximum context length is {max_model_len} tokens; the request has {prompt_len} prompt tokens{wanted}."
    return ApiError(400, text, param=param, code="context_length_exceeded")


def parse_logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    """Token ids are JSON object keys, so strings; raises ApiError 400 for a key that is no token of the vocabulary."""
    parsed = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10 or int(key) >= vocab_size:
            raise ApiError(400, f"logit_bias has the key {key[:20]!r}, which is no token id below {vocab_size}", param="logit_bias")
        parsed[int(key)] = value
    return parsed


def check_token_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Raise ApiError 400 unless every id is in the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ApiError(400, f"{param} has the token id {token}, outside the vocabulary of {vocab_size}", param=param)


def given(value: T | None, default: T) -> T:
    """The request's value, or what holds without one."""
    return default if value is None else value


def sampling_params(
    fields: SamplingFields,
    defaults: SamplingDefaults,
    *,
    seed: int,
    max_tokens: int,
    vocab_size: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: bool,
    loops: Loops | None,
) -> SamplingParams:
    """What the engine is told for one sequence; `seed` is already the sample's own. `defaults` hold where the request is silent."""
    check_token_ids(fields.stop_token_ids or [], vocab_size, "stop_token_ids")
    if fields.min_tokens > max_tokens:
        raise ApiError(400, f"min_tokens ({fields.min_tokens}) is above the token limit ({max_tokens})", param="min_tokens")
    return SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        temperature=given(fields.temperature, defaults.temperature),
        top_k=max(0, given(fields.top_k, defaults.top_k)),
        top_p=given(fields.top_p, defaults.top_p),
        min_p=given(fields.min_p, defaults.min_p),
        repetition_penalty=given(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=parse_logit_bias(fields.logit_bias, vocab_size),
        stop_token_ids=fields.stop_token_ids or [],
        ignore_eos=fields.ignore_eos,
        min_tokens=fields.min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        loops=loops,
    )
