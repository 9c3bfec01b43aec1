"""The sampler's kernel in the interpreter, against the definition and against the sampler's torch form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ep_runtime.engine.sampler import Sampler
from kernels.best_triton import best_rows
from kernels.sampling_triton import sample_rows
from kernels.shards_triton import LeftLogits
from protocol.messages import SamplingParams
from tests.support.sampling_reference import bitmask
from tests.support.sampling_rows import TABLE, columns, make_rows, possible_tokens, unpack

SHAPES = [(7, kind, 2, cap) for kind in ("grid", "equal", "single") for cap in (64, 4)]
SHAPES += [(777, kind, 128, 1024) for kind in ("normal", "peaked", "masked")]
SHAPES += [(777, kind, 128, 16) for kind in ("normal", "grid", "masked")]
SHAPES += [(5000, "grid", 1024, 4096)]


@pytest.mark.parametrize(("vocab", "kind", "lanes", "cap"), SHAPES)
def test_tokens_follow_the_definition(vocab: int, kind: str, lanes: int, cap: int) -> None:
    """The small cap sends rows of many tokens through the searches over the whole row."""
    rows = make_rows(kind, len(TABLE) + 1, vocab, seed=vocab)
    places = list(range(len(TABLE), 0, -1))
    seeds = [7 * place + cap for place in places]
    given = torch.from_numpy(np.pad(rows, ((0, 0), (0, 5)), constant_values=99.0))
    tokens, status = sample_rows(given, torch.tensor(places), *columns(TABLE, seeds, vocab, "cpu"), vocab, cap=cap, lanes=lanes)
    assert status.tolist() == [0] * len(TABLE)
    certain = 0
    for token, place, filters, seed in zip(tokens.tolist(), places, TABLE, seeds, strict=True):
        possible = possible_tokens(rows[place], filters, seed, 3)
        assert token in possible, filters
        certain += len(possible) == 1
    assert certain >= len(TABLE) - 1


@pytest.mark.parametrize("cap", [64, 4])
def test_equals_at_a_cut_stay_by_their_ids(cap: int) -> None:
    """Over many draws exactly the lowest ids among equals win: of top_k, of top_p, and of top_p among what top_k leaves."""
    row = torch.zeros(1, 40)
    row[0, [5, 9]] = 0.125
    row[0, 30:] = -0.125
    seeds = list(range(16))
    zeros = [token for token in range(30) if token not in (5, 9)]
    low = np.exp(-0.125)
    for top_k, top_p, kept in [
        (4, np.inf, [5, 9, 0, 1]),
        (40, (2.0 + 2.5 * low) / (2.0 + 28.0 * low + 10.0 * low**2), [5, 9, *zeros[:3]]),
        (6, (2.0 + 1.5 * low) / (2.0 + 4.0 * low), [5, 9, 0, 1]),
        (32, np.inf, [5, 9, *zeros, 30, 31]),
    ]:
        ones = torch.ones(len(seeds))
        keys = columns([TABLE[0]] * len(seeds), seeds, 40, "cpu")[2]
        limits = torch.full_like(ones, top_k).long(), torch.full_like(ones, top_p, dtype=torch.float64)
        rows = torch.zeros(len(seeds), dtype=torch.int64)
        tokens, _ = sample_rows(row, rows, ones, ones, keys, ones * -torch.inf, *limits, 40, cap=cap, lanes=8)
        drawn = set(tokens.tolist())
        assert drawn <= set(kept)
        assert len(drawn) >= min(len(kept), 10)


def test_rows_that_cannot_be_used_say_so() -> None:
    logits = torch.zeros(5, 300)
    logits[0] = -torch.inf
    logits[1, 250] = torch.nan
    logits[2, 3] = torch.inf
    logits[3, :] = -torch.inf
    logits[3, 299] = torch.nan
    for filters in (TABLE[0], TABLE[1]):
        tokens, status = sample_rows(logits, torch.arange(5), *columns([filters] * 5, [1] * 5, 300, "cpu"), 300, lanes=64)
        assert status.tolist() == [1, 2, 2, 2, 0]
        assert tokens.tolist()[:4] == [0] * 4
    empty, _ = sample_rows(logits, torch.arange(0), *columns([], [], 300, "cpu"), 300)
    assert empty.shape == (0,)


KINDS = [
    {"top_p": 0.8},
    {"top_k": 5, "min_p": 0.02},
    {"temperature": 0.0},
    {},
    {"top_p": 0.9, "top_k": 40, "temperature": 1.5, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"min_p": 0.1, "temperature": 0.6},
    {"logit_bias": {5: 4.0, 6: -3.0}, "min_tokens": 3, "stop_token_ids": [8]},
]


@pytest.mark.parametrize("kinds", [KINDS[:4], KINDS], ids=["unedited", "edited"])
@pytest.mark.parametrize("where", ["tensor", "left"])
def test_the_sampler_draws_what_its_torch_form_draws(kinds: list[dict[str, object]], where: str) -> None:
    vocab, slots = 600, list(range(len(kinds)))
    samplers = [Sampler(vocab, 8, "cpu", (3,), one_by_one=False, fused=fused) for fused in (True, False)]
    for sampler in samplers:
        for slot in slots:
            sampler.start(slot, SamplingParams(**{"seed": slot, "max_tokens": 9} | kinds[slot]), [slot, 4, 4], [])
    masks = [bitmask(set(range(0, vocab, 3)), vocab) if slot == 5 else None for slot in slots]
    for step in range(3):
        logits = torch.from_numpy(make_rows("normal", len(slots), vocab, step)).bfloat16()
        before = logits.clone()
        whole = logits.float()
        shard = torch.cat([logits, torch.full((len(slots), 8), 1e6, dtype=torch.bfloat16)], 1)
        left = LeftLogits(best=best_rows(shard, vocab, 0), shard=shard, vocab_size=vocab, memory=None)
        given = whole if where == "tensor" else left
        mine, reference = (
            sampler.sample(logits, slots, [step] * len(slots), masks)
            for sampler, logits in zip(samplers, (given, whole), strict=True)
        )
        assert unpack(mine) == unpack(reference)
        assert torch.equal(shard[:, :vocab], before)
        assert torch.equal(whole, before.float())


def test_the_batch_changes_nothing() -> None:
    rows = torch.from_numpy(make_rows("normal", len(TABLE), 300, 0))
    args = columns(TABLE, list(range(len(TABLE))), 300, "cpu")
    together, _ = sample_rows(rows, torch.arange(len(TABLE)), *args, 300, cap=32, lanes=64)
    for place in range(len(TABLE)):
        one = [column[place : place + 1] for column in args]
        alone, _ = sample_rows(rows, torch.tensor([place]), *one, 300, cap=32, lanes=64)
        assert alone.tolist() == [together[place]]
