"""Rows for the sampler's kernel, and the tokens that it may draw of them: by the definition, in float64, by a full sort."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ep_runtime.engine.sampler import RowStatus, Sampled
from ep_runtime.engine.sampling.logprobs import unpack_logprobs
from ep_runtime.engine.sampling.random import row_keys
from protocol.messages import TokenLogprobs

ROUNDING = 3e-6
"""Of exp, relative, and of log: cuts and winners that are this close may go either way."""


@dataclass(frozen=True, slots=True)
class Filters:
    """One row's parameters; 0, 1 and 0 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    noise: float = 1.0


TABLE = [
    Filters(),
    Filters(0.6, 20, 0.95),
    Filters(1.0, 1),
    Filters(1.0, 0, 0.9),
    Filters(1.0, 0, 1.0, 0.1),
    Filters(5.0, 0, 0.9),
    Filters(0.01, 20, 0.95),
    Filters(1.0, 10**6, 0.5),
    Filters(1.3, 3, 0.5, 0.02),
    Filters(1.0, 0, 1e-9),
    Filters(3.0, 400, 0.99),
    Filters(2.0, 4999, 0.7),
    Filters(1.0, 0, 0.9999999),
    Filters(4.0, 6),
    Filters(noise=0.0),
]


def make_rows(kind: str, count: int, vocab: int, seed: int) -> np.ndarray:
    """[count, vocab] float32; every kind but `normal` and `peaked` has equals, and `masked` and `single` have -inf."""
    generator = np.random.default_rng(seed)
    rows = generator.normal(0, 3, (count, vocab))
    match kind:
        case "peaked":
            rows = generator.permuted(-3.0 * np.log(np.arange(1, vocab + 1)) + 0.1 * rows, axis=1)
        case "grid":
            rows = np.round(rows)
        case "equal":
            rows[:] = -7.25
        case "masked":
            rows = np.where(generator.random(rows.shape) < 0.9, -np.inf, np.round(rows * 4) / 4)
            rows[:, vocab // 2] = 1.0
        case "single":
            rows[:] = -np.inf
            rows[:, vocab - 1] = 3.0
    return rows.astype(np.float32)


def log_noise(seed: int, index: int, vocab: int) -> np.ndarray:
    """[vocab] float64: log E, with the hash in plain integers."""
    low, high = (int(word) % 2**32 for word in row_keys([seed], [index])[0])

    def mixed(value: np.ndarray, add: int) -> np.ndarray:
        value ^= value >> 16
        value = (value * 0x7FEB352D + add) % 2**32
        value ^= value >> 15
        value = value * 0x846CA68B % 2**32
        return value ^ (value >> 16)

    bits = mixed(mixed(np.arange(1, vocab + 1, dtype=np.uint64), 0) ^ low, high) % 2**31
    uniform = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31), np.float32(1 - 2.0**-24))
    return np.log(-np.log1p(-uniform.astype(np.float64)))


def possible_tokens(row: np.ndarray, filters: Filters, seed: int, index: int) -> list[int]:
    """The token that is drawn, or those of which it may be any, where roundings decide."""
    scaled = (row - row.max()) / np.float32(filters.temperature)
    if filters.min_p > 0.0:
        scaled[scaled < np.float32(math.log(filters.min_p))] = -np.inf
    order = np.argsort(-scaled, kind="stable")
    if 0 < filters.top_k < len(row):
        order = order[: filters.top_k]
    mass = np.exp(scaled[order].astype(np.float64))
    before = np.cumsum(mass) - mass
    doubt = ROUNDING * bool(((mass > 0.0) & (mass < 1.0)).any())
    need = filters.top_p * mass.sum() if filters.top_p < 1.0 else np.inf
    finite = scaled[order] > -np.inf
    surely, maybe = order[finite & (before < need * (1 - doubt))], order[finite & (before < need * (1 + doubt))]
    score = scaled.astype(np.float64) - log_noise(seed, index, len(row)) * filters.noise
    top = score[surely].max()
    if not filters.noise:
        return [int(min(surely[score[surely] == top]))]
    return [int(token) for token in maybe if score[token] >= top - 2e-5]


def columns(table: list[Filters], seeds: list[int], vocab: int, device: str) -> list[torch.Tensor]:
    """What `sample_rows` takes after logits and rows; the tokens' generated index is 3."""

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return [
        column([row.temperature for row in table]),
        column([row.noise for row in table]),
        torch.from_numpy(row_keys(seeds, [3] * len(seeds))).to(device),
        column([math.log(row.min_p) if row.min_p else -math.inf for row in table]),
        torch.tensor([row.top_k if 0 < row.top_k < vocab else vocab for row in table], device=device),
        column([row.top_p if row.top_p < 1.0 else math.inf for row in table], torch.float64),
    ]


class SampledRow(NamedTuple):
    """One row's result."""

    token: int
    status: RowStatus
    logprobs: TokenLogprobs | None


def unpack(host: Sampled) -> list[SampledRow]:
    """One result a row, from a `Sampled` whose copy to the host is done."""
    logprobs: dict[int, TokenLogprobs] = {}
    if host.logprobs is not None:
        logprobs = dict(zip(host.logprob_rows, unpack_logprobs(host.logprobs, host.logprob_counts), strict=True))
    pairs = zip(host.tokens.tolist(), host.status.tolist(), strict=True)
    return [SampledRow(token, RowStatus(status), logprobs.get(row)) for row, (token, status) in enumerate(pairs)]
