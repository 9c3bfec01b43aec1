"""Attention over a paged key/value cache: for the one new row of many sequences, and for the new rows of one sequence.

Shape letters: S sequences, T rows, N blocks, P positions in a block, G query heads a key/value head. Caches are `[N, P, kv_heads,
head_dim]`. A row at position p sees positions `max(0, p - window + 1) .. p`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

QUERY_TILE = 512
"""Rows of a prompt piece that attend together: bounds the mask, and skips keys that no row of the tile may see."""

GATHER_ELEMENTS = 1 << 26
"""Most cache elements that a batch of decode rows gathers at once."""


def write_kv(k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: torch.Tensor) -> None:
    """Store keys and values `[T, kv_heads, head_dim]` at `places` [T] int64, counted in positions over all blocks."""
    k_cache.flatten(0, 1).index_copy_(0, places, k)
    v_cache.flatten(0, 1).index_copy_(0, places, v)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    host_lens: np.ndarray,
    window: int | None,
) -> torch.Tensor:
    """The last row of each of S sequences: q `[S, heads, head_dim]` -> the same shape, in q's dtype.

    block_tables `[S, B]`, seq_lens `[S]`; `host_lens` are the same lengths on the host, so that shapes need no wait.
    """
    longest = int(host_lens.max())
    if len(host_lens) == 1:
        first = 0 if window is None else max(0, longest - window)
        k, v = _gather(k_cache, v_cache, block_tables[0], first, longest)
        return _attend(q, k.unsqueeze(0), v.unsqueeze(0), None)
    blocks = -(-longest // k_cache.shape[1])
    together = max(1, GATHER_ELEMENTS // (blocks * k_cache[0].numel()))
    positions = torch.arange(blocks * k_cache.shape[1], device=q.device)
    out = []
    for start in range(0, len(host_lens), together):
        part = slice(start, start + together)
        tables, lens = block_tables[part, :blocks], seq_lens[part].unsqueeze(1)
        k = k_cache.index_select(0, tables.flatten()).view(tables.shape[0], -1, *k_cache.shape[2:])
        v = v_cache.index_select(0, tables.flatten()).view(tables.shape[0], -1, *v_cache.shape[2:])
        seen = positions < lens
        if window is not None:
            seen &= positions >= lens - window
        out.append(_attend(q[part], k, v, seen[:, None, None]))
    return out[0] if len(out) == 1 else torch.cat(out)


def piece_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_len: int, window: int | None
) -> torch.Tensor:
    """The last T rows of one sequence of `seq_len` positions: q `[T, heads, head_dim]` -> the same shape. block_table `[B]`."""
    rows = q.shape[0]
    start = seq_len - rows
    out = []
    for top in range(0, rows, QUERY_TILE):
        tile = q[top : top + QUERY_TILE]
        low, high = start + top, start + top + tile.shape[0]
        first = 0 if window is None else max(0, low - window + 1)
        k, v = _gather(k_cache, v_cache, block_table, first, high)
        at, keys = torch.arange(low, high, device=q.device).unsqueeze(1), torch.arange(first, high, device=q.device)
        seen = keys <= at
        if window is not None:
            seen &= keys > at - window
        out.append(
            functional.scaled_dot_product_attention(
                tile.transpose(0, 1).unsqueeze(0),
                k.transpose(0, 1).unsqueeze(0),
                v.transpose(0, 1).unsqueeze(0),
                attn_mask=seen,
                enable_gqa=k.shape[1] != q.shape[1],
            )[0].transpose(0, 1)
        )
    return out[0] if len(out) == 1 else torch.cat(out)


def _gather(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, first: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[end - first, kv_heads, head_dim]` of positions `first .. end - 1` of one sequence."""
    size = k_cache.shape[1]
    low = first // size
    blocks = block_table[low : -(-end // size)]
    offset, length = first - low * size, end - first
    return (
        k_cache.index_select(0, blocks).flatten(0, 1).narrow(0, offset, length),
        v_cache.index_select(0, blocks).flatten(0, 1).narrow(0, offset, length),
    )


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """One row a sequence, the G query heads of a key/value head as if they were G rows. k, v `[S, L, kv_heads, head_dim]`."""
    grouped = q.view(q.shape[0], k.shape[2], -1, q.shape[2])
    out = functional.scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen)
    return out.reshape(q.shape)
