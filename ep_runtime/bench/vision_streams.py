"""What image requests do to streams that decode beside them, next to what text prompts do to the same streams.

Requests of each kind come in turn to the same streams: one image, a text of as many tokens, a text that fills a prefill chunk; or
several at once. A round begins when requests are handed over, and ends when the next are: `between` steps after their answers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ep_runtime.bench.session import Session
from ep_runtime.bench.vision_encoder import Size
from ep_runtime.bench.vision_traffic import Maker, Request, Track, Traffic

STREAM_PROMPT = 32
COLUMNS = {
    "kind": "beside the streams",
    "at_once": "at once",
    "tokens": "tokens each",
    "rounds": "rounds",
    "median_ms": "ms/token",
    "p99_ms": "p99",
    "gap_ms": "longest gap of a round",
    "longest_ms": "longest of all",
    "cost_ms": "cost of a request",
    "first_ms": "to first token",
    "over_text": "gap/text's",
    "over_chunk": "gap/chunk's",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """How much of what: `rounds` of each kind are counted after one that is not."""

    streams: int
    steps: int
    """Of the streams alone."""
    rounds: int
    between: int
    burst: int
    burst_rounds: int


@dataclass(kw_only=True, slots=True)
class Gathered:
    """Of one kind of request: the streams' gaps by round, and times to the first token, in milliseconds."""

    tokens: int
    gaps: list[list[float]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


class Streams:
    """Streams that decode, each to be read from the moment when all of them are under way."""

    def __init__(self, traffic: Traffic, maker: Maker, count: int, new_tokens: int, settle: int) -> None:
        self._traffic = traffic
        self._tracks = [traffic.submit(maker.text(STREAM_PROMPT), new_tokens) for _ in range(count)]
        traffic.run_until(lambda: all(track.stamps for track in self._tracks))
        self.step(settle)

    def step(self, steps: int) -> None:
        """Until every stream has so many tokens more. RuntimeError when one ends before."""
        goals = [len(track.stamps) + steps for track in self._tracks]
        self._traffic.run_until(lambda: self._check() and all(self._reached(goals)))

    def gaps(self, start: float, end: float) -> list[float]:
        """Milliseconds between neighbouring tokens of each stream, those that lie in part or in full between two moments."""
        return [gap for track in self._tracks for gap in gaps_between(track.stamps, start, end)]

    def last(self) -> float:
        """When the latest token came."""
        return max(track.stamps[-1] for track in self._tracks)

    def close(self) -> None:
        """End them."""
        self._check()
        self._traffic.abort(self._tracks)

    def _reached(self, goals: Sequence[int]) -> list[bool]:
        return [len(track.stamps) >= goal for track, goal in zip(self._tracks, goals, strict=True)]

    def _check(self) -> bool:
        if any(track.ended is not None for track in self._tracks):
            raise RuntimeError("a stream has all its tokens before the requests beside it are done; give more --stream-tokens")
        return True


def measure(session: Session, maker: Maker, sizes: Sequence[Size], load: Load, stream_tokens: int) -> list[dict[str, Any]]:
    """The streams alone, then beside single requests and bursts of each size of image."""
    traffic = Traffic(session.llm)
    alone = streams_alone(traffic, maker, load, stream_tokens)
    rows = [alone]
    chunk = (session.llm.config.max_num_batched_tokens or 0) - load.streams
    for size in sizes:
        found = beside(traffic, maker, size, load, stream_tokens, at_once=1, chunk=chunk, alone_ms=alone["median_ms"])
        full = found[-1]["gap_ms"]
        if load.burst > 1:
            found += beside(traffic, maker, size, load, stream_tokens, at_once=load.burst, chunk=0, alone_ms=alone["median_ms"])
        rows += [row | {"over_chunk": row["gap_ms"] / full} for row in found]
    return rows


def streams_alone(traffic: Traffic, maker: Maker, load: Load, stream_tokens: int) -> dict[str, Any]:
    """The row of the streams with nothing beside them."""
    streams = Streams(traffic, maker, load.streams, stream_tokens, load.between)
    start = streams.last()
    streams.step(load.steps)
    gaps = streams.gaps(start, streams.last())
    streams.close()
    return {"kind": "nothing", "rounds": load.steps, **_spread(gaps), "gap_ms": None, "longest_ms": max(gaps)}


def beside(
    traffic: Traffic, maker: Maker, size: Size, load: Load, stream_tokens: int, *, at_once: int, chunk: int, alone_ms: float
) -> list[dict[str, Any]]:
    """Rows of texts and images of one size, and where `chunk` is given of texts of so many tokens, each kind in its turn."""
    image = f"image {size[0]}x{size[1]}"
    tokens = len(maker.image(size).prompt)
    kinds: dict[str, Callable[[], Request]] = {"text": lambda: maker.text(tokens), image: lambda: maker.image(size)}
    lengths = {"text": tokens, image: tokens}
    if chunk:
        kinds["text, a full chunk"] = lambda: maker.text(chunk)
        lengths["text, a full chunk"] = chunk
    gathered = {kind: Gathered(tokens=lengths[kind]) for kind in kinds}
    streams = Streams(traffic, maker, load.streams, stream_tokens, load.between)
    for number in range(1 + (load.rounds if at_once == 1 else load.burst_rounds)):
        for kind, make in kinds.items():
            requests = [make() for _ in range(at_once)]
            streams.step(load.between)  # making them took time, in which nothing ran
            gaps, first = play(traffic, streams, requests, load.between)
            if number:
                gathered[kind].gaps.append(gaps)
                gathered[kind].first += first
    streams.close()
    rows = [summary(kind, at_once, found, load.streams, alone_ms) for kind, found in gathered.items()]
    for row in rows:
        row["over_text"] = row["gap_ms"] / rows[0]["gap_ms"] if row["tokens"] == tokens else None
    return rows


def play(traffic: Traffic, streams: Streams, requests: Sequence[Request], between: int) -> tuple[list[float], list[float]]:
    """One round: the streams' gaps in it, and how long each request waited for its token."""
    tracks: list[Track] = [traffic.submit(request, 1) for request in requests]
    traffic.finish(tracks)
    streams.step(between)
    return streams.gaps(tracks[0].submitted, streams.last()), [track.first_ms for track in tracks]


def gaps_between(stamps: Sequence[float], start: float, end: float) -> list[float]:
    """Milliseconds between neighbouring moments, of those pairs that lie in part or in full between `start` and `end`."""
    return [1e3 * (after - before) for before, after in pairwise(stamps) if after > start and before < end]


def summary(kind: str, at_once: int, found: Gathered, streams: int, alone_ms: float) -> dict[str, Any]:
    """Statistics of one kind. What a request costs: by how much all its round's gaps are longer than those of streams alone."""
    gaps = [gap for of_round in found.gaps for gap in of_round]
    requests = at_once * len(found.gaps)
    return {
        "kind": kind,
        "at_once": at_once,
        "tokens": found.tokens,
        "rounds": len(found.gaps),
        **_spread(gaps),
        "gap_ms": statistics.median(map(max, found.gaps)),
        "longest_ms": max(gaps),
        "cost_ms": sum(gap - alone_ms for gap in gaps) / streams / requests,
        "first_ms": statistics.median(found.first),
        "longest_by_round_ms": [round(max(of_round), 3) for of_round in found.gaps],
        "first_all_ms": [round(value, 3) for value in found.first],
    }


def _spread(gaps: Sequence[float]) -> dict[str, float]:
    return {
        "median_ms": statistics.median(gaps),
        "p99_ms": statistics.quantiles(gaps, n=100, method="inclusive")[-1],
    }
