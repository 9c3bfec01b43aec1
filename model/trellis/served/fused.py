"""GPU kernels where the sizes allow them: norms, rotation and cache write in one, paged attention, and sums through peer memory.

Importing this module imports Triton; only a model on a GPU needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kernels.paged_decode_triton import paged_decode
from kernels.paged_prefill_triton import default_prefill_config, paged_prefill, prefill_tiles
from kernels.peer_sums import reduce_rows
from kernels.rotary_triton import attention_inputs, rotary_cos_sin
from model.base import Communicator
from model.batch import ForwardBatch, PieceRows
from model.layers.rotary import Rotary
from model.state.registry import StateRegistry
from model.trellis.attention import Attention
from model.trellis.projection import Tuning
from model.trellis.served.attention import KV, PagedAttention
from model.trellis.served.rows import Singles


class KernelAttention(PagedAttention):
    """Attention by kernels. A decode step reads nothing from the host but shapes; rows of no sequence write and read nothing."""

    def __init__(self, batch: ForwardBatch, state: StateRegistry, rotary: Rotary, dtype: torch.dtype) -> None:
        super().__init__(batch, state, rotary, dtype)
        inv_freq, scale, _ = rotary.frequencies(batch.positions.device)
        self._cos, self._sin = rotary_cos_sin(batch.positions, inv_freq, scale)
        self._tiles: dict[tuple[int, ...], torch.Tensor] = {}

    def _write(self, layer: Attention, x: torch.Tensor, tuning: Tuning, kv: KV) -> torch.Tensor:
        q_norm, k_norm = layer.q_norm, layer.k_norm
        return attention_inputs(
            torch.cat((layer.q_proj(x, tuning.q), layer.k_proj(x), layer.v_proj(x)), -1),
            self._cos,
            self._sin,
            *kv,
            self._batch.kv_places,
            heads=layer.q_proj.weight.shape[0] // layer.head_dim,
            q_norm=None if q_norm is None else q_norm.gain,
            k_norm=None if k_norm is None else k_norm.gain,
            eps=0.0 if q_norm is None else q_norm.eps,
        )

    def _decode(self, q: torch.Tensor, kv: KV, singles: Singles, window: int | None) -> torch.Tensor:
        return paged_decode(q.contiguous(), *kv, singles.tables, singles.lens, max_seq=self._batch.host.max_seq, window=window)

    def _pieces(self, q: torch.Tensor, out: torch.Tensor, kv: KV, spans: Sequence[PieceRows], window: int | None) -> None:
        batch, heads = self._batch, q.shape[1]
        config = default_prefill_config(q.shape[2], q.dtype)
        numbers = tuple(span.span for span in spans)
        if numbers not in self._tiles:
            rows = config.tile_rows(heads // kv[0].shape[2])
            table = prefill_tiles(batch.host.query_start, batch.host.seq_lens, numbers, rows)
            self._tiles[numbers] = torch.from_numpy(table).to(q.device, non_blocking=True)
        tables, starts, lens, tiles = batch.block_tables, batch.query_start, batch.seq_lens, self._tiles[numbers]
        paged_prefill(q.contiguous(), *kv, tables, starts, lens, tiles, window=window, out=out, config=config)


def reduce_lanes(lanes: torch.Tensor, comm: Communicator, dtype: torch.dtype) -> torch.Tensor:
    """Sum over ranks of `lanes [T, width]` float32, through peer memory where there is any and they fit.

    Its capacity counts elements of the model's `dtype`; a model sums lanes of one width alone, as that memory wants.
    """
    if comm.peers is not None:
        peers = replace(comm.peers, capacity=comm.peers.capacity * dtype.itemsize // lanes.element_size())
        if peers.fits(*lanes.shape):
            comm.launched += 1
            return reduce_rows(peers, lanes)
    return comm.reduce(lanes)
