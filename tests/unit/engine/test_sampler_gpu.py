"""On a GPU the sampler draws what it draws on a CPU, and never waits for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ep_runtime.engine.sampler import Sampler
from ep_runtime.engine.sampling.random import hash_bits, row_keys, token_words
from protocol.messages import SamplingParams
from tests.support.cuda import nothing_may_synchronise
from tests.support.sampling_reference import bitmask
from tests.support.sampling_rows import unpack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = 1000
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 0.5, "logprobs": 4},
    {},
    {"top_p": 0.8, "logprobs": 0},
    {"top_k": 5, "min_p": 0.02},
    {"top_p": 0.9, "top_k": 40, "temperature": 1.5, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"logit_bias": {5: 4.0, 6: -3.0}, "min_tokens": 3, "stop_token_ids": [8]},
    {"min_p": 0.1, "temperature": 0.6},
]


def test_hash_bits_are_the_same_on_both_devices() -> None:
    keys = torch.from_numpy(row_keys(list(range(50)), [7] * 50))
    on_gpu = hash_bits(token_words(VOCAB, "cuda"), keys.cuda())
    assert torch.equal(on_gpu.cpu(), hash_bits(token_words(VOCAB, "cpu"), keys))


def test_gpu_tokens_are_the_cpu_tokens_and_nothing_synchronises() -> None:
    slots = list(range(24))
    samplers = {device: Sampler(VOCAB, 24, device, (3,)) for device in ("cpu", "cuda")}
    for slot in slots:
        params = SamplingParams(**{"seed": slot, "max_tokens": 9} | KINDS[slot % len(KINDS)])
        for sampler in samplers.values():
            sampler.start(slot, params, [slot, 4, 4], [])
    masks = [bitmask(set(range(slot, VOCAB, 3)), VOCAB) if slot % 7 == 0 else None for slot in slots]
    generator = np.random.default_rng(0)
    for step in range(8):
        logits = torch.from_numpy(generator.normal(0, 3, (24, VOCAB)).astype(np.float32))
        on_gpu = logits.cuda()
        torch.cuda.synchronize()
        with nothing_may_synchronise():
            moved = samplers["cuda"].sample(on_gpu, slots, [step] * 24, masks).to_host_async()
        torch.cuda.synchronize()
        got, expected = unpack(moved), unpack(samplers["cpu"].sample(logits, slots, [step] * 24, masks))
        for mine, reference in zip(got, expected, strict=True):
            assert (mine.token, mine.status) == (reference.token, reference.status)
            assert (mine.logprobs is None) == (reference.logprobs is None)
            if mine.logprobs is not None and reference.logprobs is not None:
                assert mine.logprobs.top_ids == reference.logprobs.top_ids
                assert mine.logprobs.rank == reference.logprobs.rank
                assert mine.logprobs.logprob == pytest.approx(reference.logprobs.logprob, abs=1e-5)
