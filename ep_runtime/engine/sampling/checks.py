"""What a request may ask of the sampler: checked once at submission, so that no value can fail inside a step, beside others."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.messages import SamplingParams, Submit

MAX_FLOAT32 = 3.4e38
MAX_LOGIT_BIAS = 1e4
"""Far above any logit, far below what overflows float32."""
MOST_LOGPROBS = 256
"""Alternatives of a token: what they take is small against its row of logits."""


def submission_fault(message: Submit, vocab_size: int) -> str | None:
    """Why the sampler cannot serve this request (the text of a 400, naming the field), or None."""
    fault = sampling_fault(message.sampling, message.prompt, message.generated, vocab_size)
    if fault is None and message.sampling.grammar:
        fault = mask_fault(message.mask)
    return fault


def sampling_fault(params: SamplingParams, prompt: Sequence[int], generated: Sequence[int], vocab_size: int) -> str | None:
    """Why a stage could not compute with these values, or None: a token id outside the vocabulary, a number out of its range."""
    named = {
        "prompt": prompt,
        "generated": generated,
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
    }
    for field, ids in named.items():
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            return f"{field}: token ids must be in 0..{vocab_size - 1}"
    for field in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if not abs(getattr(params, field)) <= MAX_FLOAT32:
            return f"{field} is {getattr(params, field)}; it must be finite in float32"
    if not all(abs(value) <= MAX_LOGIT_BIAS for value in params.logit_bias.values()):
        return f"logit_bias: values must be in -{MAX_LOGIT_BIAS:g}..{MAX_LOGIT_BIAS:g}"
    for wrong, text in (
        (params.temperature < 0.0, f"temperature is {params.temperature}; it must not be negative"),
        (params.repetition_penalty <= 0.0, f"repetition_penalty is {params.repetition_penalty}; it must be positive"),
        (not params.top_p > 0.0, f"top_p is {params.top_p}; it must be positive"),
        (not 0.0 <= params.min_p <= 1.0, f"min_p is {params.min_p}; it must be in 0..1"),
        (params.top_k < 0, f"top_k is {params.top_k}; it must not be negative"),
        (params.min_tokens < 0, f"min_tokens is {params.min_tokens}; it must not be negative"),
        ((params.logprobs or 0) > MOST_LOGPROBS, f"logprobs is {params.logprobs}; at most {MOST_LOGPROBS} are given"),
        (
            (params.prompt_logprobs or 0) > MOST_LOGPROBS,
            f"prompt_logprobs is {params.prompt_logprobs}; at most {MOST_LOGPROBS} are given",
        ),
        ((params.logprobs or 0) < 0, f"logprobs is {params.logprobs}; it must not be negative"),
        ((params.prompt_logprobs or 0) < 0, f"prompt_logprobs is {params.prompt_logprobs}; it must not be negative"),
    ):
        if wrong:
            return text
    return None


def mask_fault(mask: bytes) -> str | None:
    """Why these bytes are no grammar bitmask, or None."""
    return f"a grammar mask of {len(mask)} bytes is not whole uint32 words" if len(mask) % 4 else None
