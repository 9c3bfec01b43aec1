"""The sampler's stages against token-by-token float64 formulas: edits, penalties, status, log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ep_runtime.engine.sampler import RowStatus, Sampler
from ep_runtime.engine.sampling.edits import mask_words
from protocol.messages import SamplingParams
from tests.support.sampling_reference import bitmask, edited_logits
from tests.support.sampling_rows import unpack

VOCAB = 70
EOS = (3, 41)


def make_params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "max_tokens": 64, "temperature": 0.0} | fields)


def make_logits(rows: int, seed: int = 0) -> torch.Tensor:
    """Normal logits on a grid of 1/8, so that equal values are common and float32 sums of them are exact."""
    return torch.from_numpy(np.round(np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)) * 8).astype(np.float32) / 8)


@pytest.fixture(params=["one_by_one", "batched", "fused"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return Sampler(VOCAB, 16, "cpu", EOS, one_by_one=request.param == "one_by_one", fused=request.param == "fused")


def tokens_of(sampler: Sampler, logits: torch.Tensor, slots: list[int], indices: list[int], masks: list | None = None) -> list[int]:
    before = logits.clone()
    rows = unpack(sampler.sample(logits, slots, indices, masks or [None] * len(slots)))
    assert torch.equal(before, logits)
    assert [row.status for row in rows] == [RowStatus.OK] * len(rows)
    return [row.token for row in rows]


def test_greedy_is_the_lowest_of_the_largest(sampler: Sampler) -> None:
    logits = make_logits(4)
    logits[1, [9, 17, 60]] = 50.0
    for slot in range(4):
        sampler.start(slot, make_params(), [1], [])
    expected = [row.tolist().index(max(row.tolist())) for row in logits]
    assert expected[1] == 9
    assert tokens_of(sampler, logits, [0, 1, 2, 3], [0, 5, 6, 7]) == expected


def test_tiny_temperature_is_greedy_and_a_small_one_does_not_overflow(sampler: Sampler) -> None:
    logits = make_logits(2) * 100
    sampler.start(0, make_params(temperature=1e-30), [1], [])
    sampler.start(1, make_params(temperature=2e-5), [1], [])
    assert tokens_of(sampler, logits, [0, 1], [0, 0]) == [int(np.argmax(row.numpy())) for row in logits]


CASES = {
    "bias": {"logit_bias": {5: 30.0, 6: 30.125, 0: -100.0}},
    "bias_last_token": {"logit_bias": {VOCAB - 1: 100.0}},
    "min_tokens": {"min_tokens": 4, "logit_bias": {3: 90.0, 41: 95.0, 8: 80.0, 10: 70.0}, "stop_token_ids": [8]},
    "min_tokens_reached": {"min_tokens": 3, "logit_bias": {41: 95.0}},
    "repetition": {"repetition_penalty": 1.75},
    "repetition_below_one": {"repetition_penalty": 0.25},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 0.75},
    "negative": {"presence_penalty": -2.0, "frequency_penalty": -1.5},
    "all": {
        "logit_bias": {int(t): 4.0 for t in range(0, VOCAB, 3)},
        "min_tokens": 9,
        "stop_token_ids": [5, 6],
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    },
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_edits_follow_the_formulas(sampler: Sampler, fields: dict) -> None:
    """Each case alone in a batch with plain rows, with and without a grammar, over many logits; greedy shows the edited logits."""
    generator = np.random.default_rng(7)
    for trial in range(20):
        logits = make_logits(3, trial)
        prompt = generator.integers(0, VOCAB, 12).tolist()
        generated = [7, 7, 7] if trial % 2 else np.argsort(-logits[1].numpy(), kind="stable")[[0, 0, 1]].tolist()
        allowed = set(generator.integers(0, VOCAB, 25).tolist()) - {3, 41, 5, 6, 8}
        params = make_params(**fields)
        for slot in (0, 1, 2):
            sampler.start(slot, params if slot else make_params(), prompt, generated)
        mask = bitmask(allowed, VOCAB)
        chosen = tokens_of(sampler, logits, [0, 1, 2], [3, 3, 3], [None, None, mask])
        assert chosen[0] == int(logits[0].argmax())
        for row, limit in ((1, None), (2, allowed)):
            edited = edited_logits(logits[row].numpy(), params, prompt=prompt, generated=generated, eos=EOS, allowed=limit)
            # Penalties divide: float32 may order values differently that are equal to its precision.
            assert edited[chosen[row]] == pytest.approx(max(edited), abs=1e-5)
        sampler.check_integrity()


def test_penalties_follow_tokens_sampled_on_the_device(sampler: Sampler) -> None:
    """Constant logits: each step's frequency penalty moves on to the token that is then the best."""
    params = make_params(frequency_penalty=1.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, :5] = torch.tensor([8.0, 7.5, 7.0, 2.0, 1.0])
    sampler.start(2, params, [0, 0, 0], [])
    history: list[int] = []
    for step in range(12):
        history += tokens_of(sampler, logits, [2], [step])
        edited = edited_logits(logits[0].numpy(), params, prompt=[0, 0, 0], generated=history[:-1])
        assert history[-1] == edited.index(max(edited))
    assert len(set(history)) == 3


def test_penalty_rows_are_reused_clean(sampler: Sampler) -> None:
    params = make_params(presence_penalty=100.0, repetition_penalty=3.0)
    for slot in range(16):
        sampler.start(slot, params, [slot], [slot + 20])
    sampler.check_integrity()
    for slot in range(0, 16, 2):
        sampler.stop(slot)
    sampler.start(4, params, [1], [2])
    logits = torch.zeros(1, VOCAB)
    logits[0, 24] = 9.0
    assert tokens_of(sampler, logits, [4], [0]) == [24]
    sampler.start(4, make_params(), [1], [2])
    sampler.check_integrity()
    with pytest.raises(KeyError):
        sampler.stop(0)


def test_min_tokens_ends_at_its_index(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 41] = 9.0
    logits[0, 12] = 1.0
    sampler.start(0, make_params(min_tokens=2, ignore_eos=True), [1], [])
    assert [tokens_of(sampler, logits, [0], [index])[0] for index in (0, 1, 2, 3)] == [12, 12, 41, 41]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_token_says_so_and_harms_no_other(sampler: Sampler, temperature: float) -> None:
    logits = make_logits(5)
    logits[3, 9] = torch.nan
    logits[4, 9] = torch.inf
    for slot in range(5):
        filters = {"top_p": 0.5} if slot == 2 else {}
        sampler.start(slot, make_params(temperature=temperature, presence_penalty=1.0 * (slot == 1), **filters), [1], [])
    empty = bytes(4 * 3)
    rows = unpack(sampler.sample(logits, [0, 1, 2, 3, 4], [0] * 5, [None, empty, empty, None, None]))
    wanted = [RowStatus.OK, RowStatus.EMPTY, RowStatus.EMPTY, RowStatus.NOT_FINITE, RowStatus.NOT_FINITE]
    assert [row.status for row in rows] == wanted
    assert [row.token for row in rows[1:]] == [0, 0, 0, 0]
    alone = unpack(sampler.sample(logits[:1], [0], [0], [None]))
    assert alone[0].token == rows[0].token


def test_a_mask_of_another_length() -> None:
    assert mask_words(b"\x01\x00\x00\x80", 70).tolist() == [1 - 2**31, 0, 0]
    assert mask_words(b"\xff" * 20, 33).tolist() == [-1, -1]
    with pytest.raises(ValueError, match="uint32"):
        mask_words(b"\xff" * 5, 70)


@pytest.mark.parametrize(
    ("fields", "prompt", "generated", "name"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, [1], [], "logit_bias"),
        ({"stop_token_ids": [-1]}, [1], [], "stop_token_ids"),
        ({}, [VOCAB], [], "prompt"),
        ({}, [1], [VOCAB + 5], "generated"),
        ({"repetition_penalty": 0.0}, [1], [], "repetition_penalty"),
        ({"top_p": 0.0}, [1], [], "top_p"),
    ],
)
def test_start_refuses_what_no_stage_can_use(sampler: Sampler, fields: dict, prompt: list, generated: list, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        sampler.start(0, make_params(**fields), prompt, generated)
    with pytest.raises(ValueError, match="slot 16"):
        sampler.start(16, make_params(), [1], [])


def test_logprobs_are_of_the_unprocessed_distribution(sampler: Sampler) -> None:
    logits = make_logits(4)
    logits[2] = 0.0
    edits = {"logit_bias": {11: 60.0}, "temperature": 0.7, "repetition_penalty": 1.3}
    sampler.start(0, make_params(logprobs=0, **edits), [1], [])
    sampler.start(1, make_params(), [1], [])
    sampler.start(2, make_params(logprobs=3), [1], [])
    sampler.start(3, make_params(logprobs=VOCAB + 9), [1], [])
    rows = unpack(sampler.sample(logits, [0, 1, 2, 3], [0] * 4, [None] * 4).to_host_async())
    assert rows[0].token == 11
    assert rows[1].logprobs is None
    for row, count in ((0, 0), (2, 3), (3, VOCAB)):
        got = rows[row].logprobs
        assert got is not None
        raw = logits[row].double().numpy()
        reference = raw - np.log(np.exp(raw).sum())
        assert got.logprob == pytest.approx(reference[rows[row].token], abs=1e-5)
        assert got.rank == 1 + sum(value > raw[rows[row].token] for value in raw)
        assert got.top_ids == sorted(range(VOCAB), key=lambda token: (-raw[token], token))[:count]
        assert got.top_logprobs == pytest.approx(reference[got.top_ids], abs=1e-5)
    assert rows[2].logprobs is not None
    assert rows[2].logprobs.top_ids == [0, 1, 2]


def test_equal_zeros_of_either_sign_rank_by_id(sampler: Sampler) -> None:
    logits = torch.full((1, VOCAB), -1.0)
    logits[0, [4, 8, 20]] = torch.tensor([-0.0, 0.0, -0.0])
    assert sampler.prompt_logprobs(logits, torch.tensor([20]), 4).ids.tolist() == [[20, 4, 8, 20, 0]]


@pytest.mark.parametrize("rows", [0, 1, 63, 65, 130])
def test_prompt_logprobs_match_log_softmax(sampler: Sampler, rows: int) -> None:
    logits = make_logits(rows, 3)
    targets = torch.from_numpy(np.random.default_rng(4).integers(0, VOCAB, rows))
    got = sampler.prompt_logprobs(logits, targets, 2)
    raw = logits.double().numpy()
    reference = raw - np.log(np.exp(raw).sum(axis=1, keepdims=True))
    assert got.ids.shape == (rows, 3)
    for row in range(rows):
        order = sorted(range(VOCAB), key=lambda token: (-raw[row, token], token))
        assert got.ids[row].tolist() == [int(targets[row]), *order[:2]]
        assert got.logprobs[row].tolist() == pytest.approx(reference[row, got.ids[row]], abs=1e-5)
        assert int(got.ranks[row]) == 1 + (raw[row] > raw[row, int(targets[row])]).sum()
