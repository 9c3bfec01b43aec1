"""What a decode step of one rank reads of its weights, as plain numbers: benchmarks set measured times beside it. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBytes:
    """One rank's weights, in bytes: one expert of one layer, its part of the output projection, and all else that each step reads.

    `row` are the entries of large tables that one token looks up, the embedding's apart. `state` is what a token changes of its
    sequence's recurrent states, where that is not all of them.
    """

    expert: int
    head: int
    dense: int
    row: int = 0
    state: int | None = None
