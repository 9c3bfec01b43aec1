"""Randomness and filters: the distribution drawn from, independence of the batch, and replay."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ep_runtime.engine.sampler import Sampler
from ep_runtime.engine.sampling.filters import candidates, drop_below_min_p, rank_and_cut
from ep_runtime.engine.sampling.random import hash_bits, log_exponential, mix64, row_keys, token_words
from protocol.messages import SamplingParams
from tests.support.sampling_reference import (
    assert_drawn_from,
    bitmask,
    chi_square_limit,
    edited_logits,
    kept_tokens,
    probabilities,
)
from tests.support.sampling_rows import unpack


def make_params(seed: int = 1, **fields: object) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "max_tokens": 64} | fields)


def hash_by_hand(seed: int, index: int, token: int) -> int:
    """The documented hash in plain Python integers."""

    def lowbias(value: int, add: int) -> int:
        value ^= value >> 16
        value = (value * 0x7FEB352D + add) % 2**32
        value ^= value >> 15
        value = value * 0x846CA68B % 2**32
        return value ^ (value >> 16)

    def mix(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix((mix((seed + golden) % 2**64) + index * golden) % 2**64)
    return lowbias(lowbias(token + 1, 0) ^ (key % 2**32), key >> 32) % 2**31


def test_mix64_is_splitmix64() -> None:
    """First outputs of splitmix64 from state 1234567, as published with its reference implementation."""
    states = [(1234567 + step * 0x9E3779B97F4A7C15) % 2**64 for step in (1, 2, 3, 4, 5)]
    assert mix64(np.array(states, np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_the_hash_is_exact_integer_arithmetic() -> None:
    seeds, indices = [0, 1, -1, 2**63 + 5, 2**64 + 1], [0, 1, 77, 2**31, 3]
    bits = hash_bits(token_words(300, "cpu"), torch.from_numpy(row_keys(seeds, indices)))
    assert bits.tolist() == [[hash_by_hand(s, i, t) for t in range(300)] for s, i in zip(seeds, indices, strict=True)]
    assert row_keys([1], [9]).tolist() == row_keys([2**64 + 1], [9]).tolist()


def test_bits_are_even_and_neighbours_unrelated() -> None:
    """Every bit is set half the time, and differs half the time between neighbouring seeds, indices and tokens."""
    words = token_words(2000, "cpu")
    base = hash_bits(words, torch.from_numpy(row_keys(list(range(100)), [0] * 100)))
    later = hash_bits(words, torch.from_numpy(row_keys(list(range(100)), [1] * 100)))
    limit = 5 / math.sqrt(base.numel())
    for sample in (base, base ^ later, base[:, 1:] ^ base[:, :-1], base[1:] ^ base[:-1]):
        for bit in range(31):
            assert abs(((sample >> bit) & 1).float().mean().item() - 0.5) < limit


def test_noise_is_exponential() -> None:
    noise = log_exponential(token_words(5000, "cpu"), torch.from_numpy(row_keys(list(range(40)), [3] * 40))).double().exp()
    assert bool(torch.isfinite(noise).all())
    assert noise.min() > 0
    edges = torch.tensor([-math.log(1 - step / 50) for step in range(1, 50)], dtype=torch.float64)
    counts = torch.bucketize(noise.flatten(), edges).bincount(minlength=50).double()
    expected = noise.numel() / 50
    assert float(((counts - expected) ** 2 / expected).sum()) < chi_square_limit(49)


def test_noise_at_the_ends_of_the_hash_is_finite() -> None:
    """The word whose hash is 0 under a key, and the one whose hash is 2**31 - 1, by inverting the hash."""

    def unshift(value: int, by: int) -> int:
        out = value
        for _ in range(32 // by + 1):
            out = value ^ (out >> by)
        return out

    key_low, key_high = (int(word) % 2**32 for word in row_keys([9], [4])[0])
    words = []
    for bits in (0, 2**31 - 1, 2**31, 2**32 - 1):
        value = unshift(unshift(bits, 16) * pow(0x846CA68B, -1, 2**32) % 2**32, 15)
        value = unshift((value - key_high) * pow(0x7FEB352D, -1, 2**32) % 2**32, 16) ^ key_low
        words.append(value - (value >> 31 << 32))
    keys, tensor = torch.from_numpy(row_keys([9], [4])), torch.tensor(words, dtype=torch.int32)
    assert hash_bits(tensor, keys).tolist() == [[0, 2**31 - 1, 0, 2**31 - 1]]
    low, high = log_exponential(tensor, keys)[0, :2].exp().tolist()
    assert low == pytest.approx(2.0**-32, rel=1e-4)
    assert high == pytest.approx(24 * math.log(2), rel=1e-4)


def kept_by_filters(row: torch.Tensor, params: SamplingParams, narrow: bool) -> list[int]:
    """Survivors of one row [1, V], best first, by the sampler's filter functions."""
    vocab = row.shape[1]
    scaled = row - row.amax()
    drop_below_min_p(scaled, torch.tensor([[math.log(params.min_p) if params.min_p else -math.inf]]))
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    ids, dropped = torch.arange(vocab), 0.0
    if narrow:
        ids, dropped = candidates(scaled, top_k, params.top_p)
    limit = torch.tensor([[params.top_p if params.top_p < 1 else math.inf]], dtype=torch.float64)
    ranked, columns = rank_and_cut(scaled[:, ids], torch.tensor([[top_k]]), limit, dropped)
    return ids[columns[0]][ranked[0] > -math.inf].tolist()


@pytest.mark.parametrize("narrow", [True, False], ids=["narrowed", "whole"])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_filters_keep_what_the_naive_ranking_keeps(narrow: bool, spread: float) -> None:
    generator = np.random.default_rng(5)
    for trial in range(150):
        vocab = int(generator.choice([1, 2, 17, 64, 300])) if trial % 10 else 2500
        values = generator.normal(0, spread, vocab)
        if trial % 2:
            values = np.round(values / spread) * spread
        row = torch.from_numpy(values.astype(np.float32)).unsqueeze(0)
        if trial % 5 == 0 and vocab > 2:
            row[0, : vocab // 2] = -math.inf
        params = make_params(
            top_k=int(generator.choice([0, 1, 2, 7, vocab, vocab + 5])),
            top_p=float(generator.choice([1.0, 0.999, 0.9, 0.317, 1e-6])),
            min_p=float(generator.choice([0.0, 0.03, 0.51, 1.0])),
        )
        assert kept_by_filters(row, params, narrow) == kept_tokens(row[0].double().tolist(), params), (trial, params)


@pytest.mark.parametrize("narrow", [True, False], ids=["narrowed", "whole"])
def test_boundary_ties_go_to_the_lowest_ids(narrow: bool) -> None:
    row = torch.zeros(1, 8)
    assert kept_by_filters(row, make_params(top_p=0.5), narrow) == [0, 1, 2, 3]
    assert kept_by_filters(row, make_params(top_p=0.501), narrow) == [0, 1, 2, 3, 4]
    assert kept_by_filters(row, make_params(top_k=3), narrow) == [0, 1, 2]
    assert kept_by_filters(row, make_params(top_k=4, top_p=0.5), narrow) == [0, 1]
    assert kept_by_filters(row, make_params(min_p=1.0), narrow) == list(range(8))


DISTRIBUTIONS = {
    "plain": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.3},
    "greedy": {"temperature": 0.0},
    "greedy_edited": {"temperature": 0.0, "presence_penalty": 0.5, "logit_bias": {1: 0.5}},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "filters": {"top_k": 9, "top_p": 0.9, "min_p": 0.02, "temperature": 1.4},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    "edits": {"logit_bias": {2: 3.0, 5: -4.0}, "min_tokens": 5, "stop_token_ids": [1]},
    "everything": {
        "temperature": 0.8,
        "top_k": 8,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.2,
        "logit_bias": {4: 2.0},
        "min_tokens": 4,
    },
}


@pytest.mark.parametrize("masked", [False, True], ids=["free", "masked"])
@pytest.mark.parametrize("fields", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_draws_follow_the_reference_distribution(fields: dict, masked: bool) -> None:
    vocab, draws, eos, prompt, generated = 14, 3000, (7,), [1, 2, 2], [3, 3, 5]
    logits = np.random.default_rng(11).normal(0, 1.5, vocab).astype(np.float32)
    allowed = set(range(vocab)) - {0, 6, 12} if masked else None
    batched = Sampler(vocab, draws, "cpu", eos, one_by_one=False)
    single = Sampler(vocab, draws, "cpu", eos, one_by_one=True)
    for slot in range(draws):
        batched.start(slot, make_params(seed=slot, **fields), prompt, generated)
    mask = None if allowed is None else bitmask(allowed, vocab)
    tokens = batched.sample(torch.from_numpy(logits).repeat(draws, 1), range(draws), [3] * draws, [mask] * draws).tokens

    params = make_params(**fields)
    edited = edited_logits(logits, params, prompt=prompt, generated=generated, eos=eos, allowed=allowed)
    assert_drawn_from(tokens.bincount(minlength=vocab).numpy(), probabilities(edited, params))
    for slot in range(50):
        single.start(slot, make_params(seed=slot, **fields), prompt, generated)
    some = single.sample(torch.from_numpy(logits).repeat(50, 1), range(50), [3] * 50, [mask] * 50).tokens
    assert some.tolist() == tokens[:50].tolist()


def test_successive_indices_of_one_seed_are_draws_too() -> None:
    vocab, draws = 10, 4000
    logits = np.random.default_rng(2).normal(0, 1, vocab).astype(np.float32)
    sampler = Sampler(vocab, draws, "cpu", ())
    for slot in range(draws):
        sampler.start(slot, make_params(seed=5), [1], [])
    tokens = sampler.sample(torch.from_numpy(logits).repeat(draws, 1), range(draws), range(draws), [None] * draws).tokens
    reference = probabilities(logits.astype(float).tolist(), make_params())
    assert_drawn_from(tokens.bincount(minlength=vocab).numpy(), reference)
    pairs = (tokens[:-1] * vocab + tokens[1:]).bincount(minlength=vocab * vocab).numpy()
    assert_drawn_from(pairs, np.outer(reference, reference).ravel())


def many_requests(vocab: int) -> list[SamplingParams]:
    kinds = list(DISTRIBUTIONS.values())
    return [make_params(seed=100 + n, **kinds[n % len(kinds)] | {"logprobs": n % 3 or None}) for n in range(22)]


def run_steps(
    sampler: Sampler, requests: list[SamplingParams], members: list[int], histories: dict[int, list[int]], steps: int
) -> None:
    """Sample `steps` tokens for the member requests in one batch, request n in slot 2n + 1, extending their histories."""
    for n in members:
        sampler.start(2 * n + 1, requests[n], [n, n + 1, 3], histories[n])
    for _ in range(steps):
        indices = [len(histories[n]) for n in members]
        rows = [np.random.default_rng([n, i]).normal(0, 2, sampler.vocab_size) for n, i in zip(members, indices, strict=True)]
        logits = torch.from_numpy(np.stack(rows).astype(np.float32))
        masks = [bitmask(set(range(n % 4, sampler.vocab_size, 2)), sampler.vocab_size) if n % 5 == 0 else None for n in members]
        result = sampler.sample(logits, [2 * n + 1 for n in members], indices, masks)
        for n, row in zip(members, unpack(result), strict=True):
            histories[n].append(row.token)
    for n in members:
        sampler.stop(2 * n + 1)
    sampler.check_integrity()


@pytest.mark.parametrize("one_by_one", [True, False], ids=["one_by_one", "batched"])
def test_tokens_do_not_depend_on_the_batch_or_on_an_interruption(one_by_one: bool) -> None:
    vocab, steps = 101, 6
    requests = many_requests(vocab)
    alone: dict[int, list[int]] = {n: [] for n in range(len(requests))}
    for n in alone:
        run_steps(Sampler(vocab, 64, "cpu", (9,)), requests, [n], alone, steps)

    together: dict[int, list[int]] = {n: [] for n in alone}
    run_steps(Sampler(vocab, 64, "cpu", (9,), one_by_one=one_by_one), requests, list(together), together, steps)
    assert together == alone

    replayed: dict[int, list[int]] = {n: [] for n in alone}
    sampler = Sampler(vocab, 64, "cpu", (9,), one_by_one=one_by_one)
    run_steps(sampler, requests, [*range(0, 22, 2)], replayed, 2)
    run_steps(sampler, requests, [*range(21, 0, -2)], replayed, 5)
    run_steps(sampler, requests, [*range(20, -1, -2)], replayed, 4)
    run_steps(sampler, requests, [*range(1, 22, 2)], replayed, 1)
    assert replayed == alone
