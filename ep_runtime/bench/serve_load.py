"""The load of `serve`: when requests come, how long they are, and what is in them. All of it follows from a seed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRequest:
    """One request: seconds after the start at which it comes, its prompt's token ids, and how many tokens it must get."""

    at: float
    prompt: list[int]
    output_len: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadShape:
    """What a load is drawn from. `request_rate` in requests per second, infinite: all come at once. Lengths are in tokens."""

    num_prompts: int
    request_rate: float
    input_len: int
    output_len: int
    range_ratio: float
    vocab_size: int
    seed: int


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a load, by the names that vLLM's and SGLang's serve benchmarks have."""
    parser.add_argument("--num-prompts", type=int, default=1000, help="requests in all (default: %(default)s)")
    parser.add_argument(
        "--request-rate", type=positive, default=math.inf, help="requests per second, a Poisson process; inf: all at once (default)"
    )
    parser.add_argument("--random-input-len", type=int, default=1024, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--random-output-len", type=int, default=128, help="tokens of an answer (default: %(default)s)")
    parser.add_argument(
        "--random-range-ratio",
        type=ratio,
        default=0.0,
        help="R: lengths are drawn evenly from LEN * (1 - R) to LEN * (1 + R), as in vLLM (default: %(default)s)",
    )
    parser.add_argument("--max-concurrency", type=int, help="requests under way at most; others wait in the client, off the clock")
    parser.add_argument("--seed", type=int, default=0)


def plan_load(shape: LoadShape) -> list[PlannedRequest]:
    """The requests in order of arrival. Arrivals, lengths and tokens have random streams of their own."""
    arrivals = arrival_times(shape.num_prompts, shape.request_rate, shape.seed)
    lengths = np.random.default_rng([shape.seed, 1])
    inputs = draw_lengths(shape.num_prompts, shape.input_len, shape.range_ratio, lengths)
    outputs = draw_lengths(shape.num_prompts, shape.output_len, shape.range_ratio, lengths)
    tokens = np.random.default_rng([shape.seed, 2])
    return [
        PlannedRequest(at=at, prompt=tokens.integers(0, shape.vocab_size, length).tolist(), output_len=new)
        for at, length, new in zip(arrivals, inputs, outputs, strict=True)
    ]


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which `count` requests of a Poisson process come: gaps are exponential with mean 1 / `rate`, the first is at 0."""
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng([seed, 0]).exponential(1.0 / rate, max(0, count - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


def draw_lengths(count: int, length: int, range_ratio: float, random: np.random.Generator) -> list[int]:
    """Whole numbers drawn evenly from `length` * (1 - ratio) to `length` * (1 + ratio), both included, none below 1."""
    low, high = max(1, math.floor(length * (1 - range_ratio))), max(1, math.ceil(length * (1 + range_ratio)))
    return random.integers(low, high, count, endpoint=True).tolist()


def share_out(requests: Sequence[PlannedRequest], max_concurrency: int | None, shares: int) -> list[tuple[list[int], int | None]]:
    """Who sends what: for each of `shares` clients the indices of its requests in turn, and its part of the concurrency."""
    found: list[tuple[list[int], int | None]] = []
    for share in range(shares):
        part = None if max_concurrency is None else max_concurrency // shares + (share < max_concurrency % shares)
        found.append((list(range(share, len(requests), shares)), part))
    return found


def positive(text: str) -> float:
    """A number above 0; "inf" is one."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def ratio(text: str) -> float:
    """A number from 0 to below 1."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 to below 1")
    return value
