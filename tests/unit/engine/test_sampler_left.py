"""The sampler on logits that were left where they were made: the tokens are those of the same logits in one tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ep_runtime.engine.sampler import Sampler
from kernels.best_triton import best_rows
from kernels.shards_triton import LeftLogits
from protocol.messages import SamplingParams
from tests.support.sampling_reference import bitmask
from tests.support.sampling_rows import unpack

VOCAB = 2500
KINDS = [{"temperature": 0.0}, {"temperature": 0.0, "logprobs": 3}, {"top_p": 0.8, "logprobs": 0}, {"top_k": 5}]
KINDS += [{"temperature": 0.0, "frequency_penalty": 0.5}, {"temperature": 0.0, "min_tokens": 5}]


def left(logits: torch.Tensor) -> LeftLogits:
    """Of one rank, with padding."""
    shard = torch.cat([logits, torch.full((len(logits), 3), 1e6)], 1)
    return LeftLogits(best=best_rows(shard, VOCAB, 0), shard=shard, vocab_size=VOCAB, memory=None)


@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[:2], KINDS], ids=["greedy", "logprobs", "all"])
def test_left_logits_give_the_same_rows(kinds: list[dict[str, object]]) -> None:
    slots = list(range(2 * len(kinds) + 1))
    samplers = [Sampler(VOCAB, 16, "cpu", (3,), one_by_one=False) for _ in range(2)]
    for sampler in samplers:
        for slot in slots:
            sampler.start(slot, SamplingParams(**{"seed": slot, "max_tokens": 9} | kinds[slot % len(kinds)]), [slot, 4, 4], [])
    masks = [bitmask(set(range(slot, VOCAB, 3)), VOCAB) if slot == 5 else None for slot in slots]
    generator = np.random.default_rng(0)
    for step in range(3):
        logits = torch.from_numpy(generator.normal(0, 3, (len(slots), VOCAB)).astype(np.float32))
        logits[step, 7] = np.nan
        indices = [step] * len(slots)
        whole, apart = (
            sampler.sample(given, slots, indices, masks) for sampler, given in zip(samplers, (logits, left(logits)), strict=True)
        )
        assert torch.equal(whole.tokens, apart.tokens)
        assert whole.status.tolist() == apart.status.tolist()
        assert str(unpack(whole.to_host_async())) == str(unpack(apart.to_host_async()))
