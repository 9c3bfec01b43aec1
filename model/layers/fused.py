"""The layers' operators as GPU kernels. What a kernel does not take (odd head sizes, other dtypes) runs in torch, layer by layer.

Importing this module imports Triton; only a model on a GPU needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from kernels.best_triton import best_rows
from kernels.delta_chunk_triton import delta_pieces
from kernels.delta_decode_triton import DeltaWeights, delta_decode
from kernels.delta_plan import DeltaPlan, delta_plan
from kernels.experts_config import ExpertsConfig, default_config, experts_config, experts_shape
from kernels.experts_grouped import sum_pairs
from kernels.experts_triton import moe_pairs
from kernels.few_rows import MOST_ROWS, FewRowsConfig, few_rows_config, few_rows_shape
from kernels.few_rows import default_config as default_linear
from kernels.few_rows_triton import linear_rows
from kernels.grouping import group_pairs
from kernels.paged_decode_triton import paged_decode
from kernels.paged_prefill_triton import PrefillConfig, default_prefill_config, paged_prefill, prefill_tiles
from kernels.paged_step_triton import attention_step
from kernels.pairs import Pairs
from kernels.peer_memory import PeerMemory
from kernels.peer_rows import gather_add_norm_rows, gather_owned_rows, scatter_add_norm_rows
from kernels.peer_sums import reduce_add_norm_rows, reduce_rows
from kernels.rms_norm_triton import add_norm_rows, norm_rows, silu_mul
from kernels.rotary_triton import attention_inputs, rotary_cos_sin, row_places
from kernels.router_triton import FUSED_ROWS, route_logits, route_rows, router_logits
from kernels.shards_triton import LeftLogits, shown_shard
from kernels.start_triton import embed_rows
from kernels.tuning import Tuning, sums_shape
from model.base import Communicator
from model.batch import ForwardBatch
from model.fit import attention_fits, delta_fits
from model.formats import DenseFormat
from model.layers.attention import Attention
from model.layers.delta_net import CONV, GatedDeltaNet, H
from model.layers.head import VocabHead
from model.layers.linear import Linear
from model.layers.mlp import Mlp
from model.layers.moe import Moe
from model.layers.norm import RMSNorm
from model.layers.operators import Pending, TorchOperators
from model.layers.rotary import Rotary
from model.layers.step import Step


class _Norms(TypedDict):
    """Norms of query and key heads."""

    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    zero_centered: bool


class _How(TypedDict):
    """Of a norm, and of its launch."""

    zero_centered: bool
    pdl: bool


@dataclass(slots=True)
class Prepared:
    """Tables of one batch that all layers read. The torch forms' tables are made when a layer first asks for them."""

    cos: torch.Tensor
    sin: torch.Tensor
    places: torch.Tensor
    deltas: DeltaPlan | None
    torch_tables: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    tiles: dict[int, torch.Tensor]
    """Tiles of prompt pieces, by query heads a key/value head."""


class FusedOperators:
    """GPU kernels with tuned configurations. One object serves one model: it owns the counters that its kernels leave at zero.

    With `pdl` (programmatic dependent launch) a kernel of a decode step is set up while the one before it still runs, and waits for
    its results on the device. Every kernel here lets its successor start only after its own wait, so order holds along the chain.
    """

    takes_joined = True

    def __init__(self, device: torch.device, tuning: Tuning, *, pdl: bool = True) -> None:
        self._device = device
        self._pdl = pdl
        self._tuning = tuning
        self._torch = TorchOperators()
        self._configs: dict[tuple[int, int, int, int], ExpertsConfig] = {}
        self._linear_configs: dict[tuple[int, torch.Size, torch.dtype], FewRowsConfig] = {}
        self._ways: dict[tuple[int, int, int], bool] = {}
        self._turns = torch.zeros(1 << 18, dtype=torch.int32, device=device)

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One launch."""
        return embed_rows(token_ids, table, pdl=self._pdl)

    def leave(self, head: VocabHead, rows: torch.Tensor, embedding: torch.Tensor, step: Step) -> LeftLogits | None:
        """The projection, into memory that rank 0 reads, and the best of each row, which rank 0 gets."""
        memory, place = step.comm.shards, None
        if step.comm.world > 1:
            place = None if memory is None else shown_shard(memory, len(rows), head.shard)
            if place is None:
                return None
            step.comm.launched += 1
        shard = head.project(rows, embedding, None if head.rank == 0 else place)
        best = best_rows(shard, len(head.vocab), head.vocab.start, memory, pdl=self._pdl)
        return LeftLogits(best=best, shard=shard, vocab_size=head.vocab_size, memory=memory)

    def prepare(self, batch: ForwardBatch, rotary: Rotary, dtype: torch.dtype) -> object:
        """Rotary tables, places in the cache, and for prompt pieces the tiles and chunks of their kernels."""
        inv_freq, scale, parts = rotary.frequencies(batch.positions.device)
        cos, sin = rotary_cos_sin(batch.positions, inv_freq, scale, parts)
        pieces = [piece.span for piece in batch.host.pieces]
        return Prepared(
            cos=cos,
            sin=sin,
            places=row_places(batch.kv_places, batch.written_rows, batch.num_rows),
            deltas=delta_plan(batch.host.query_start, pieces, self._device) if pieces else None,
            torch_tables=lambda: rotary.tables(batch.positions, dtype),
            tiles={},
        )

    def rows_stay(self, batch: ForwardBatch, comm: Communicator, x: torch.Tensor) -> bool:
        """Where sums of the step's rows go through peer memory, all of them: they have one shape.

        The rank that keeps most rows receives of each what every peer has, and sends it to every peer. Two shots spread that: they
        are sooner done from 2 / world of all rows on. In words a sum moves as much for every row.
        """
        peers = self._peers(x, batch, comm)
        if peers is None:
            return False
        rows, width = x.shape
        return not peers.two_shots or peers.in_words(rows, width, x.dtype) or batch.busiest * peers.world < 2 * rows

    def whole(self, rows: torch.Tensor, step: Step) -> torch.Tensor:
        """In place."""
        if step.row_owner is not None:
            assert step.comm.peers is not None, "rows stay where there is peer memory alone"
            step.comm.launched += 1
            gather_owned_rows(step.comm.peers, rows, step.row_owner, pdl=self._pdl)
        return rows

    def add_norm(self, x: torch.Tensor, pending: Pending | None, norm: RMSNorm, step: Step) -> torch.Tensor:
        """One launch; for a partial sum that fits peer memory, the reduction in it."""
        if pending is None:
            return norm_rows(x, norm.weight, norm.eps, zero_centered=norm.zero_centered, pdl=self._pdl)
        peers = self._peers(x, step.batch, step.comm) if pending.partial else None
        if peers is not None and step.row_owner is not None:
            return self._move(peers, step.row_owner, x, pending, norm, step)
        if peers is not None:
            step.comm.launched += 1
            return reduce_add_norm_rows(
                peers,
                pending.value,
                x,
                norm.weight,
                norm.eps,
                zero_centered=norm.zero_centered,
                shared=pending.shared,
                shared_gate=pending.shared_gate,
                pdl=self._pdl,
            )
        return add_norm_rows(
            x,
            step.comm.reduce(_summed(pending.value)) if pending.partial and step.comm.world > 1 else pending.value,
            norm.weight,
            norm.eps,
            zero_centered=norm.zero_centered,
            shared=pending.shared,
            shared_gate=pending.shared_gate,
            pdl=self._pdl,
        )

    def _move(
        self, peers: PeerMemory, owners: torch.Tensor, x: torch.Tensor, pending: Pending, norm: RMSNorm, step: Step
    ) -> torch.Tensor:
        """`add_norm` of what is partial in a step whose rows stay with their owners."""
        step.comm.launched += 1
        into = (owners, x, norm.weight, norm.eps)
        how: _How = {"zero_centered": norm.zero_centered, "pdl": self._pdl}
        if pending.owned:
            assert isinstance(pending.value, torch.Tensor)
            return gather_add_norm_rows(peers, pending.value, *into, **how)
        return scatter_add_norm_rows(peers, pending.value, *into, shared=pending.shared, shared_gate=pending.shared_gate, **how)

    def settle(self, x: torch.Tensor, pending: Pending, step: Step) -> None:
        """In torch: only captures of a layer's output need it."""
        peers = self._peers(x, step.batch, step.comm) if pending.partial else None
        if peers is not None:
            step.comm.launched += 1
            pending = replace(pending, value=reduce_rows(peers, pending.value), partial=False)
        self._torch.settle(x, replace(pending, value=_summed(pending.value)), step)

    def _peers(self, x: torch.Tensor, batch: ForwardBatch, comm: Communicator) -> PeerMemory | None:
        """The memory that a sum of `x`'s shape goes through; None if it does not fit, or NCCL was measured to be faster.

        A decode step uses it whenever the sum fits: a graph holds no NCCL, and the run before a capture compiles what that
        launches. Both ways give the same bits.
        """
        peers = comm.peers
        if peers is None or not peers.fits(*x.shape):
            return None
        if batch.decode_only:
            return peers
        rows, width = x.shape
        key = (rows, width, peers.world)
        if key not in self._ways:
            plain = self._tuning.find("sums", sums_shape(width, peers.world, str(x.dtype).removeprefix("torch.")), rows)
            self._ways[key] = plain is None or plain["way"] == "peers"
        return peers if self._ways[key] else None

    def linear(self, layer: Linear, x: torch.Tensor, step: Step) -> torch.Tensor:
        """In a decode step of few rows, a kernel that asks for its weights before its input is there, unless the library is faster.

        Weights of other formats or layouts, and all other steps, go the layer's own way.
        """
        weight = layer.weight
        dense = isinstance(weight, DenseFormat) and weight.weight.is_contiguous()
        if not (dense and step.batch.decode_only and len(x) <= MOST_ROWS):
            return layer(x)
        key = (len(x), weight.shape, x.dtype)
        if key not in self._linear_configs:
            columns, depth = weight.shape
            plain = self._tuning.find("few_rows", few_rows_shape(depth, columns, str(x.dtype).removeprefix("torch.")), len(x))
            self._linear_configs[key] = default_linear(len(x), depth) if plain is None else few_rows_config(plain)
        config = self._linear_configs[key]
        if config.way == "library":
            return layer(x)
        return linear_rows(x, weight.dequantize(), layer.bias, config, self._turns, pdl=self._pdl)

    def attention(self, layer: Attention, projected: torch.Tensor, step: Step) -> torch.Tensor:
        """A decode step in one kernel; else norms, rotation and cache write in one, then attention of single rows and of pieces."""
        prepared, batch = step.prepared, step.batch
        if not self.static(layer, batch.block_size):
            step.prepared = prepared.torch_tables()
            out = layer.attend(projected, step)
            step.prepared = prepared
            return out
        inputs = (projected, prepared.cos, prepared.sin, *step.state.kv(layer.number), prepared.places)
        q_norm, k_norm = layer.q_norm, layer.k_norm
        norms: _Norms = {
            "q_norm": None if q_norm is None else q_norm.weight,
            "k_norm": None if k_norm is None else k_norm.weight,
            "eps": 0.0 if q_norm is None else q_norm.eps,
            "zero_centered": q_norm is not None and q_norm.zero_centered,
        }
        if batch.decode_only:
            return attention_step(
                *inputs,
                batch.block_tables,
                batch.seq_lens,
                self._turns,
                heads=layer.heads,
                max_seq=batch.host.max_seq,
                window=layer.window,
                gated=layer.gated,
                pdl=self._pdl,
                **norms,
            )
        q = attention_inputs(*inputs, heads=layer.heads, pdl=self._pdl, **norms)
        gate = projected[:, layer.width + 2 * layer.kv_width :] if layer.gated else None
        return self._attend(layer, q, gate, step)

    def _attend(self, layer: Attention, q: torch.Tensor, gate: torch.Tensor | None, step: Step) -> torch.Tensor:
        """Queries `[T, heads, head_dim]` over the cache, beside pieces of prompts: single rows by one kernel, pieces by another."""
        batch = step.batch
        k_cache, v_cache = step.state.kv(layer.number)
        tables, lens, window = batch.block_tables, batch.seq_lens, layer.window
        out = torch.empty(q.shape[0], layer.width, dtype=q.dtype, device=q.device)
        if batch.single_spans is not None and len(batch.single_spans):
            paged_decode(
                q,
                k_cache,
                v_cache,
                tables,
                lens,
                max_seq=int(batch.host.single_lens.max()),
                window=window,
                gate=gate,
                query_start=batch.query_start,
                spans=batch.single_spans,
                out=out,
                turns=self._turns,
            )
        if batch.host.pieces:
            config = default_prefill_config(layer.head_dim, q.dtype)
            tiles = self._tiles(batch, step.prepared, layer.heads // layer.kv_heads, config)
            paged_prefill(
                q,
                k_cache,
                v_cache,
                tables,
                batch.query_start,
                lens,
                tiles,
                window=window,
                gate=gate,
                out=out,
                config=config,
            )
        return out

    def delta(self, layer: GatedDeltaNet, projected: torch.Tensor, step: Step) -> torch.Tensor:
        """One kernel for single rows; convolution, chunks, states and outputs for pieces."""
        batch = step.batch
        conv, h = step.state.recurrent(layer.number, CONV), step.state.recurrent(layer.number, H)
        if not self.static(layer, batch.block_size):
            return layer.mix(projected, step)
        weights = DeltaWeights(layer.conv, layer.a_log, layer.dt_bias, layer.norm.weight, layer.norm.eps)
        key_heads = layer.shape.key_heads
        if batch.decode_only:
            return delta_decode(projected, conv, h, batch.slots, weights, self._turns, key_heads=key_heads, pdl=self._pdl)
        out = torch.empty(projected.shape[0], layer.shape.value_width, dtype=projected.dtype, device=projected.device)
        if batch.single_rows is not None and batch.single_spans is not None and len(batch.single_rows):
            slots = batch.slots.index_select(0, batch.single_spans)
            delta_decode(projected, conv, h, slots, weights, self._turns, key_heads=key_heads, rows=batch.single_rows, out=out)
        if step.prepared.deltas is not None:
            delta_pieces(projected, conv, h, batch.slots, weights, step.prepared.deltas, key_heads=key_heads, out=out)
        return out

    def experts(self, layer: Moe, x: torch.Tensor, step: Step) -> torch.Tensor | Pairs:
        """Router and choice, then the experts that this rank holds; a joined shared expert is one of them.

        The sum over a row's choices is left to `add_norm`.
        """
        config = self._experts_config(layer, x.shape[0], x.dtype)
        router, gate_up, down = layer.weights()
        bias, groups = layer.router.bias, None
        if bias is None and 1 <= x.shape[0] <= FUSED_ROWS and x.is_contiguous():
            weights, experts, groups = route_rows(
                x,
                router,
                layer.top_k,
                layer.normalise,
                self._turns,
                layer.held.local,
                gate_up.shape[0],
                config.block_rows,
                shared=layer.sharers,
                pdl=self._pdl,
            )
        else:
            logits = router_logits(x, router, bias)
            weights, experts = route_logits(logits, layer.top_k, layer.normalise, shared=layer.sharers, pdl=self._pdl)
        if step.batch.routing:
            step.routing.append(experts[:, : layer.top_k])
        if groups is None and config.block_rows and gate_up.shape[0]:
            groups = group_pairs(experts, layer.held.local, gate_up.shape[0], config.block_rows, self._turns)
        return moe_pairs(x, experts, weights, layer.held.local, gate_up, down, config=config, groups=groups)

    def mlp(self, layer: Mlp, gate_up: torch.Tensor) -> torch.Tensor:
        """One kernel."""
        return silu_mul(gate_up, pdl=self._pdl)

    def static(self, mixer: Attention | GatedDeltaNet, block_size: int) -> bool:
        """Whether the kernels take the layer's sizes; its decode step is theirs alone then."""
        if isinstance(mixer, Attention):
            return attention_fits(mixer.head_dim, block_size)
        return delta_fits(mixer.shape.key_dim, mixer.shape.value_dim)

    def _tiles(self, batch: ForwardBatch, prepared: Prepared, group: int, config: PrefillConfig) -> torch.Tensor:
        if group not in prepared.tiles:
            spans = [piece.span for piece in batch.host.pieces]
            table = prefill_tiles(batch.host.query_start, batch.host.seq_lens, spans, config.tile_rows(group))
            prepared.tiles[group] = torch.from_numpy(table).to(self._device, non_blocking=True)
        return prepared.tiles[group]

    def _experts_config(self, layer: Moe, rows: int, dtype: torch.dtype) -> ExpertsConfig:
        held, twice, hidden = layer.gate_up.shape
        key = (rows, hidden, twice, held)
        if key not in self._configs:
            shape = experts_shape(hidden, twice // 2, held, layer.top_k, str(dtype).removeprefix("torch."))
            plain = self._tuning.find("experts", shape, rows)
            self._configs[key] = default_config(rows, layer.top_k, held) if plain is None else experts_config(plain)
        return self._configs[key]


def _summed(value: torch.Tensor | Pairs) -> torch.Tensor:
    return sum_pairs(value) if isinstance(value, Pairs) else value
