"""Checksums of rows of integers: each counts times an odd weight of its place in the row, modulo 2^64.

Sums of integers are the same in any order, so equal bits give equal sums on any device, and an odd weight keeps a change of one
integer from vanishing. `checksum_triton` is the same on a GPU.
"""

from __future__ import annotations

import torch

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
"""int64 with the bits of two u64: 2^64 over the golden ratio, and a multiplier of splitmix64."""

CHUNK = 1 << 20
"""Most integers whose products are in memory at once, 8 bytes each."""


def place_weights(start: int, count: int, device: torch.device) -> torch.Tensor:
    """int64 `[count]`: odd, well spread weights of places `start ..`."""
    place = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device) * GOLDEN
    return ((place ^ (place >> 31)) * MIX) | 1


def row_sums(words: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """int64 `[n]`: the sum of each of `rows` [n] int64 of `words [rows, width]`, of integers of any size."""
    sums = torch.zeros(len(rows), dtype=torch.int64, device=words.device)
    for first in range(0, words.shape[1], CHUNK):
        weights = place_weights(first, min(CHUNK, words.shape[1] - first), words.device)
        columns = words.narrow(1, first, len(weights))
        step = max(1, CHUNK // len(weights))
        for start in range(0, len(rows), step):
            some = columns.index_select(0, rows[start : start + step])
            sums[start : start + step] += (some * weights).sum(1)
    return sums
