"""The figures of `serve`, from what its clients saw of each request. Names and units are those of vLLM's serve benchmark.

TTFT: from a request sent to its first chunk. ITL: between neighbouring chunks of a stream, all of them together. TPOT:
(E2EL - TTFT) / (tokens - 1) for each request of two tokens or more. E2EL: from a request sent to its last chunk. Tokens are those
of `usage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

PERCENTILES = (90, 99)
OBJECTIVES = ("ttft", "tpot", "e2el")
METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
WIDTH = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One request as its client saw it: `perf_counter` of its sending and of every chunk, and the token counts of its `usage`.

    `error` says what went wrong, empty when nothing did.
    """

    index: int
    due: float
    sent: float
    stamps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first chunk."""
        return self.stamps[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds to the last chunk."""
        return self.stamps[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds of each token after the first; None with fewer than two."""
        return (self.e2el - self.ttft) / (self.completion_tokens - 1) if self.completion_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        """Seconds between its chunks."""
        return [after - before for before, after in pairwise(self.stamps)]


def summarise(records: Sequence[RequestRecord], began: float, objectives: Mapping[str, float]) -> dict[str, Any]:
    """All figures by their JSON names; `objectives` in milliseconds by name. RuntimeError when no request succeeded."""
    good = [record for record in records if not record.error]
    if not good:
        raise RuntimeError(f"none of {len(records)} requests succeeded: {records[0].error if records else 'there was none'}")
    duration = max(record.stamps[-1] for record in good) - began
    inputs, outputs = (sum(getattr(record, name) for record in good) for name in ("prompt_tokens", "completion_tokens"))
    tpots = [record.tpot for record in good if record.tpot is not None]
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration,
        "request_goodput": count_good(good, objectives) / duration if objectives else None,
        "input_throughput": inputs / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "concurrency": sum(record.e2el for record in good) / duration,
        "max_concurrent_requests": most_at_once(good),
    }
    seconds = {
        "ttft": [record.ttft for record in good],
        "tpot": tpots,
        "itl": [gap for record in good for gap in record.itls],
        "e2el": [record.e2el for record in good],
    }
    for name, values in seconds.items():
        result |= {f"{kind}_{name}_ms": value for kind, value in spread(values).items()}
    return result


def spread(seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles (linear between ranks) in milliseconds; None of nothing."""
    names = ("mean", "median", "std", *(f"p{percentile}" for percentile in PERCENTILES))
    if not seconds:
        return dict.fromkeys(names)
    values = 1e3 * np.asarray(seconds)
    found = (values.mean(), np.median(values), values.std(), *np.percentile(values, PERCENTILES))
    return {name: float(value) for name, value in zip(names, found, strict=True)}


def count_good(records: Sequence[RequestRecord], objectives: Mapping[str, float]) -> int:
    """Requests that meet every objective (at most so many milliseconds). One of a single token has no TPOT to miss."""
    return sum(
        all(value is None or 1e3 * value <= objectives[name] for name in objectives for value in [getattr(record, name)])
        for record in records
    )


def most_at_once(records: Sequence[RequestRecord]) -> int:
    """The most requests that were under way together."""
    moves = sorted([(record.sent, 1) for record in records] + [(record.stamps[-1], -1) for record in records])
    return int(np.cumsum([step for _, step in moves]).max())


def result_text(result: Mapping[str, Any]) -> str:
    """The printed block, as users of vLLM's and SGLang's benchmarks know it."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    head = {
        "Successful requests": "completed",
        "Failed requests": "failed",
        "Maximum request concurrency": "max_concurrency",
        "Request rate configured (RPS)": "request_rate",
        "Benchmark duration (s)": "duration",
        "Total input tokens": "total_input_tokens",
        "Total generated tokens": "total_output_tokens",
        "Request throughput (req/s)": "request_throughput",
        "Request goodput (req/s)": "request_goodput",
        "Input token throughput (tok/s)": "input_throughput",
        "Output token throughput (tok/s)": "output_throughput",
        "Total token throughput (tok/s)": "total_token_throughput",
        "Concurrency": "concurrency",
        "Peak concurrent requests": "max_concurrent_requests",
    }
    lines += [_line(title, result[key]) for title, key in head.items() if result.get(key) is not None]
    for name, title in METRICS.items():
        lines.append(title.center(WIDTH, "-"))
        for kind in ("mean", "median", *(f"p{percentile}" for percentile in PERCENTILES)):
            value = result[f"{kind}_{name}_ms"]
            lines.append(_line(f"{kind.capitalize()} {name.upper()} (ms)", "-" if value is None else value))
    return "\n".join([*lines, "=" * WIDTH])


def parse_objectives(pairs: Sequence[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` as milliseconds by name. Raises ValueError for another form or name."""
    found: dict[str, float] = {}
    for pair in pairs:
        name, colon, text = pair.partition(":")
        if not colon or name not in OBJECTIVES or not float(text) >= 0:
            raise ValueError(f"{pair!r} is not NAME:MILLISECONDS with a name of {', '.join(OBJECTIVES)}")
        found[name] = float(text)
    return found


def _line(title: str, value: Any) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{title + ':':<40} {shown:<10}".rstrip()
