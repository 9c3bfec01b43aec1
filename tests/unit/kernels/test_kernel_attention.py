"""Paged attention against softmax attention in float64 over the same positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kernels.paged_attention as paged

BLOCK = 4


class Sequences:
    """Keys and values of several sequences, in float64 by position and in shuffled blocks of a cache full of noise."""

    def __init__(self, lengths: list[int], kv_heads: int, head_dim: int) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        self.lengths = lengths
        self.keys = [torch.randn(length, kv_heads, head_dim, generator=generator) for length in lengths]
        self.values = [torch.randn(length, kv_heads, head_dim, generator=generator) for length in lengths]
        counts = [-(-length // BLOCK) for length in lengths]
        blocks = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        self.k_cache, self.v_cache = (torch.randn(len(blocks), BLOCK, kv_heads, head_dim, generator=generator) for _ in range(2))
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for number, count in enumerate(counts):
            mine = [blocks.pop() for _ in range(count)]
            self.tables[number, :count] = torch.tensor(mine, dtype=torch.int32)
            places = torch.tensor([block * BLOCK + offset for block in mine for offset in range(BLOCK)][: lengths[number]])
            paged.write_kv(self.k_cache, self.v_cache, self.keys[number], self.values[number], places)

    def attend(self, number: int, q: torch.Tensor, position: int, window: int | None) -> torch.Tensor:
        """One row `[heads, head_dim]` at a position, head by head."""
        first = 0 if window is None else max(0, position - window + 1)
        keys, values = self.keys[number][first : position + 1].double(), self.values[number][first : position + 1].double()
        group = q.shape[0] // keys.shape[1]
        out = []
        for head, row in enumerate(q.double()):
            scores = keys[:, head // group] @ row / row.shape[0] ** 0.5
            out.append(scores.softmax(0) @ values[:, head // group])
        return torch.stack(out)


SHAPES = [(1, 1, 2), (3, 1, 8), (6, 2, 16), (5, 5, 4)]


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("lengths", [[1], [63], [65, 1, 4, 30]], ids=str)
def test_decode(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the batch is too large to gather at once."""
    sequences = Sequences(lengths, kv_heads, head_dim)
    q = torch.randn(len(lengths), heads, head_dim, generator=torch.Generator().manual_seed(1))
    lens = torch.tensor(lengths, dtype=torch.int32)
    expected = torch.stack([sequences.attend(number, q[number], length - 1, window) for number, length in enumerate(lengths)])
    for limit in (1 << 26, 1):
        monkeypatch.setattr(paged, "GATHER_ELEMENTS", limit)
        got = paged.decode_attention(q, sequences.k_cache, sequences.v_cache, sequences.tables, lens, np.array(lengths), window)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(("length", "rows"), [(2, 2), (63, 63), (65, 2), (65, 40)])
def test_piece(
    length: int, rows: int, heads: int, kv_heads: int, head_dim: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rows are cut into several tiles."""
    sequences = Sequences([length], kv_heads, head_dim)
    q = torch.randn(rows, heads, head_dim, generator=torch.Generator().manual_seed(1))
    expected = torch.stack([sequences.attend(0, q[row], length - rows + row, window) for row in range(rows)])
    for tile in (512, 7):
        monkeypatch.setattr(paged, "QUERY_TILE", tile)
        got = paged.piece_attention(q, sequences.k_cache, sequences.v_cache, sequences.tables[0], length, window)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
