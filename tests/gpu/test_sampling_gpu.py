"""The sampler's kernel on a GPU: against the definition, the torch form, itself in another batch, and itself again."""

from __future__ import annotations

import pytest
import torch

from ep_runtime.engine.sampler import Sampler
from kernels.sampling_triton import sample_rows
from protocol.messages import SamplingParams
from tests.support.sampling_rows import TABLE, columns, make_rows, possible_tokens, unpack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(vocab, kind) for vocab in (7, 777, 5001) for kind in ("normal", "peaked", "grid", "equal", "masked", "single")]
SHAPES += [(151936, kind) for kind in ("normal", "peaked", "grid")]


@pytest.mark.parametrize("cap", [4096, 64])
@pytest.mark.parametrize(("vocab", "kind"), SHAPES)
def test_tokens_follow_the_definition(vocab: int, kind: str, cap: int) -> None:
    rows = make_rows(kind, len(TABLE), vocab, seed=vocab)
    places, seeds = list(range(len(TABLE))), [7 * place + cap for place in range(len(TABLE))]
    args = columns(TABLE, seeds, vocab, "cuda")
    given = torch.from_numpy(rows).cuda()
    tokens, status = sample_rows(given, torch.tensor(places, device="cuda"), *args, vocab, cap=cap)
    assert status.tolist() == [0] * len(TABLE)
    for token, place, filters, seed in zip(tokens.tolist(), places, TABLE, seeds, strict=True):
        assert token in possible_tokens(rows[place], filters, seed, 3), filters
    again, _ = sample_rows(given, torch.tensor(places[::-1], device="cuda"), *(arg.flip(0) for arg in args), vocab, cap=cap)
    assert torch.equal(again.flip(0), tokens)


def test_rows_that_cannot_be_used_say_so() -> None:
    logits = torch.zeros(4, 30000, device="cuda")
    logits[0] = -torch.inf
    logits[1, 29999] = torch.nan
    logits[2, 3] = torch.inf
    for filters in (TABLE[0], TABLE[1]):
        args = columns([filters] * 4, [1] * 4, 30000, "cuda")
        tokens, status = sample_rows(logits, torch.arange(4, device="cuda"), *args, 30000)
        assert status.tolist() == [1, 2, 2, 0]
        assert tokens.tolist()[:3] == [0] * 3


def test_the_torch_form_draws_the_same() -> None:
    """Of many rows all but those where two tokens are within rounding, which are rare, and from bfloat16 logits, too."""
    vocab, slots = 151936, list(range(96))
    kinds = [
        {},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_p": 0.9, "presence_penalty": 1.0},
    ]
    samplers = [Sampler(vocab, 96, "cuda", (3,), fused=fused) for fused in (True, False)]
    for sampler in samplers:
        for slot in slots:
            sampler.start(slot, SamplingParams(**{"seed": slot, "max_tokens": 9} | kinds[slot % 5]), [slot], [])
    for step, kind in enumerate(("normal", "peaked")):
        logits = torch.from_numpy(make_rows(kind, 96, vocab, step)).cuda().bfloat16().float()
        sampled = [one.sample(logits, slots, [step] * 96, [None] * 96).to_host_async() for one in samplers]
        torch.cuda.synchronize()
        mine, reference = map(unpack, sampled)
        assert sum(a != b for a, b in zip(mine, reference, strict=True)) <= 1
