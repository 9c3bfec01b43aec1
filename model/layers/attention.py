"""Grouped-query softmax attention over the paged cache."""

from __future__ import annotations

import torch

from kernels.paged_attention import decode_attention, piece_attention, write_kv
from kernels.rotary import rotate
from model.config import LayerConfig, ModelConfig
from model.layers.build import Build
from model.layers.module import StepModule
from model.layers.norm import RMSNorm
from model.layers.step import Step


class Attention(StepModule):
    """One fused projection gives queries, keys, values and, in some families, a gate for the output, in this order."""

    def __init__(self, number: int, layer: LayerConfig, config: ModelConfig, build: Build) -> None:
        super().__init__()
        shape = config.attention
        self.number = number
        self.window = layer.window
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.width, self.kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.gated = shape.output_gate
        out = self.width * (2 if self.gated else 1) + 2 * self.kv_width
        self.qkv = build.linear(config.hidden_size, out, bias=shape.bias)
        self.out = build.linear(self.width, config.hidden_size, bias=shape.bias)
        self.q_norm = self.k_norm = None
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, config.norm_eps, build, zero_centered=config.zero_centered)
            self.k_norm = RMSNorm(shape.head_dim, config.norm_eps, build, zero_centered=config.zero_centered)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`; writes the rows' keys and values before reading the cache."""
        linear = step.operators.linear
        return linear(self.out, step.operators.attention(self, linear(self.qkv, x, step), step), step)

    def attend(self, projected: torch.Tensor, step: Step) -> torch.Tensor:
        """The torch form of everything between the two projections: `[T, heads * head_dim]`."""
        cos, sin = step.prepared
        heads = projected[:, : self.width + 2 * self.kv_width].unflatten(1, (-1, self.head_dim))
        turning = self.heads + self.kv_heads
        if self.q_norm is None or self.k_norm is None:
            q, k = rotate(heads[:, :turning], cos, sin).split((self.heads, self.kv_heads), 1)
        else:
            q = rotate(self.q_norm(heads[:, : self.heads]), cos, sin)
            k = rotate(self.k_norm(heads[:, self.heads : turning]), cos, sin)
        out = self._attend(q, k, heads[:, turning:], step).flatten(1)
        if self.gated:
            out = out * projected[:, self.width + 2 * self.kv_width :].sigmoid()
        return out

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step) -> torch.Tensor:
        """Queries `[T, heads, head_dim]` -> outputs of that shape."""
        batch = step.batch
        k_cache, v_cache = step.state.kv(self.number)
        if batch.written_rows is not None:
            k, v = k.index_select(0, batch.written_rows), v.index_select(0, batch.written_rows)
        write_kv(k_cache, v_cache, k, v, batch.kv_places)
        if batch.decode_only:
            return decode_attention(q, k_cache, v_cache, batch.block_tables, batch.seq_lens, batch.host.seq_lens, self.window)
        out = torch.empty_like(q)
        if batch.single_rows is not None and batch.single_spans is not None and len(batch.single_rows):
            tables, lens = (
                batch.block_tables.index_select(0, batch.single_spans),
                batch.seq_lens.index_select(0, batch.single_spans),
            )
            rows = q.index_select(0, batch.single_rows)
            out.index_copy_(
                0,
                batch.single_rows,
                decode_attention(rows, k_cache, v_cache, tables, lens, batch.host.single_lens, self.window),
            )
        for piece in batch.host.pieces:
            rows = q[piece.start : piece.stop]
            table = batch.block_tables[piece.span]
            out[piece.start : piece.stop] = piece_attention(rows, k_cache, v_cache, table, piece.seq_len, self.window)
        return out
