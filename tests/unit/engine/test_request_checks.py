"""What the sampler's checks refuse, by field, and what they let pass at its very bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ep_runtime.engine.sampling.checks import MOST_LOGPROBS, mask_fault, sampling_fault, submission_fault
from protocol.messages import SamplingParams, Submit

VOCAB = 50
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("temperature", {"temperature": -0.1}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": math.nan}),
    ("repetition_penalty", {"repetition_penalty": 1e39}),
    ("presence_penalty", {"presence_penalty": -math.inf}),
    ("frequency_penalty", {"frequency_penalty": math.nan}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": math.nan}),
    ("top_k", {"top_k": -1}),
    ("min_p", {"min_p": 1.01}),
    ("min_p", {"min_p": math.nan}),
    ("min_tokens", {"min_tokens": -1}),
    ("logprobs", {"logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("logprobs", {"logprobs": MOST_LOGPROBS + 1}),
    ("prompt_logprobs", {"prompt_logprobs": MOST_LOGPROBS + 1}),
    ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
    ("logit_bias", {"logit_bias": {-1: 1.0}}),
    ("logit_bias", {"logit_bias": {3: math.inf}}),
    ("logit_bias", {"logit_bias": {3: math.nan}}),
    ("stop_token_ids", {"stop_token_ids": [VOCAB]}),
]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "max_tokens": 4, **fields})


@pytest.mark.parametrize(("field", "fields"), REFUSED)
def test_refused_by_field(field: str, fields: dict[str, Any]) -> None:
    fault = sampling_fault(params(**fields), [1], [], VOCAB)
    assert fault is not None
    assert fault.startswith(field)


def test_token_ids_of_prompt_and_answer_are_in_the_vocabulary() -> None:
    assert sampling_fault(params(), [0, VOCAB - 1], [VOCAB - 1], VOCAB) is None
    for prompt, generated in (([VOCAB], []), ([-1], []), ([1], [VOCAB])):
        fault = sampling_fault(params(), prompt, generated, VOCAB)
        assert fault == f"{'generated' if generated else 'prompt'}: token ids must be in 0..{VOCAB - 1}"


def test_the_bounds_themselves_pass() -> None:
    extreme = params(
        seed=-(2**63),
        temperature=0.0,
        top_k=2**62,
        top_p=5.0,
        min_p=1.0,
        logprobs=0,
        prompt_logprobs=MOST_LOGPROBS,
        min_tokens=0,
        logit_bias={0: -100.0, VOCAB - 1: 100.0},
    )
    assert sampling_fault(extreme, [], [], VOCAB) is None


def test_only_a_grammar_needs_a_mask_of_whole_words() -> None:
    assert mask_fault(b"abcd") is None
    assert mask_fault(b"abc") == "a grammar mask of 3 bytes is not whole uint32 words"
    for grammar in (False, True):
        submit = Submit("r", "r", [1], params(grammar=grammar), mask=b"abc")
        assert (submission_fault(submit, VOCAB) is not None) == grammar
