"""Attention of one forward over the paged caches. A cache has one entry a position, whatever the number of loops.

Outside the core and in loop 1 every row writes its entry. A later loop moves the entries of the rows that run, in place, and
attends after that: `model.trellis.attention` has the rule. Entries are kept by position, so a window is a matter of what is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from kernels.paged_attention import decode_attention, piece_attention, write_kv
from model.batch import ForwardBatch, PieceRows
from model.layers.rotary import Rotary
from model.state.registry import StateRegistry
from model.trellis.attention import Attention, SlidingAttention
from model.trellis.norm import wide
from model.trellis.projection import Tuning
from model.trellis.served.rows import Rows, Singles
from model.trellis.window import moved

KV: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A layer's keys and values, each `[num_blocks, block_size, kv_heads, head_dim]`."""


class PagedAttention:
    """In torch, on any device: the specification."""

    def __init__(self, batch: ForwardBatch, state: StateRegistry, rotary: Rotary, dtype: torch.dtype) -> None:
        self._batch = batch
        self._state = state
        self._rotary = rotary
        self._dtype = dtype
        self._tables: KV | None = None

    def __call__(self, layer: Attention, number: int, loop: int, x: torch.Tensor, tuning: Tuning, rows: Rows) -> torch.Tensor:
        """`x [m, d] -> [m, d]` of layer `number` in `loop` (0 outside the core)."""
        kv = self._state.kv(number)
        window = None
        if isinstance(layer, SlidingAttention):
            window = layer.window
        if isinstance(layer, SlidingAttention) and loop > 1:
            q = self._refine(layer, x, tuning, kv, rows)
        else:
            q = self._write(layer, x, tuning, kv)
        return layer.o_proj(self._attend(q, kv, rows, window))

    def _write(self, layer: Attention, x: torch.Tensor, tuning: Tuning, kv: KV) -> torch.Tensor:
        """Queries of all rows `[T, heads, head_dim]`; their keys and values are written."""
        q, k, v = layer.project(x, tuning, *self._turns())
        write_kv(*kv, k, v, self._batch.kv_places)
        return q

    def _refine(self, layer: SlidingAttention, x: torch.Tensor, tuning: Tuning, kv: KV, rows: Rows) -> torch.Tensor:
        """Queries of the rows that run `[m, heads, head_dim]`; their entries are moved."""
        cos, sin = (table if rows.index is None else table.index_select(0, rows.index) for table in self._turns())
        q, k, v = layer.project(x, tuning, cos, sin)
        gate = layer.gate(x)
        for cache, new in zip(kv, (k, v), strict=True):
            entries = cache.flatten(0, 1)
            held = entries.index_select(0, rows.places)
            entries.index_copy_(0, rows.places, moved(held, new, gate).to(cache.dtype))
        return q

    def _turns(self) -> KV:
        """Cosines and sines of all rows `[T, 1, head_dim]`, made when they are first asked for."""
        if self._tables is None:
            self._tables = self._rotary.tables(self._batch.positions, wide(self._dtype))
        return self._tables

    def _attend(self, q: torch.Tensor, kv: KV, rows: Rows, window: int | None) -> torch.Tensor:
        """Queries of the rows that run -> `[m, heads * head_dim]`.

        A piece attends as a whole: where some of its rows do not run, theirs are zeros, and nobody looks at what they see.
        """
        singles = rows.singles
        if singles is not None and not rows.pieces:
            return self._decode(q, kv, singles, window)
        whole = q
        if rows.index is not None:
            whole = q.new_zeros(self._batch.num_rows, *q.shape[1:]).index_copy_(0, rows.index, q)
        out = torch.empty(whole.shape[0], whole[0].numel(), dtype=q.dtype, device=q.device)
        if singles is not None:
            out.index_copy_(0, singles.rows, self._decode(whole.index_select(0, singles.rows), kv, singles, window))
        self._pieces(whole, out, kv, [piece.span for piece in rows.pieces], window)
        return out if rows.index is None else out.index_select(0, rows.index)

    def _decode(self, q: torch.Tensor, kv: KV, singles: Singles, window: int | None) -> torch.Tensor:
        """The last row of each sequence: `q [n, heads, head_dim] -> [n, heads * head_dim]`."""
        return decode_attention(q, *kv, singles.tables, singles.lens, singles.host_lens, window).flatten(1)

    def _pieces(self, q: torch.Tensor, out: torch.Tensor, kv: KV, spans: Sequence[PieceRows], window: int | None) -> None:
        """Rows of pieces, from `q [T, heads, head_dim]` into `out [T, heads * head_dim]`."""
        for span in spans:
            table = self._batch.block_tables[span.span]
            rows = piece_attention(q[span.start : span.stop], *kv, table, span.seq_len, window)
            out[span.start : span.stop] = rows.flatten(1)
