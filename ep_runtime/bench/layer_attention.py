"""Problems of attention over caches in blocks: decode steps, whole steps from the projection on, and pieces of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ep_runtime.bench.layer_inputs import BLOCK, AttentionShape, Inputs
from ep_runtime.bench.layer_problem import EPS, Problem, Tensors, normal
from kernels.paged_attention import decode_attention, piece_attention, write_kv
from kernels.paged_decode_triton import DecodeConfig, default_decode_config, paged_decode
from kernels.paged_prefill_triton import PrefillConfig, default_prefill_config, paged_prefill, prefill_tiles
from kernels.paged_step_triton import StepConfig, attention_step, default_step_config
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary_tables, rotate
from kernels.rotary_triton import rotary_cos_sin


class Paged:
    """Sequences of given lengths in shuffled blocks of several caches, and new rows at their ends."""

    def __init__(self, shape: AttentionShape, lengths: Sequence[int], counts: Sequence[int], sets: int) -> None:
        self.shape = shape
        self.lens = np.array(lengths, dtype=np.int32)
        self.starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        needed = -(-self.lens // BLOCK)
        blocks = torch.randperm(int(needed.sum()) + 1, device="cuda", dtype=torch.int32)
        self.tables = torch.zeros(len(lengths), int(needed.max()), dtype=torch.int32, device="cuda")
        at = 0
        for number, count in enumerate(needed.tolist()):
            self.tables[number, :count] = blocks[at : at + count]
            at += count
        self.seq_lens = torch.from_numpy(self.lens).cuda()
        self.query_start = torch.from_numpy(self.starts).cuda()
        size = (len(blocks), BLOCK, shape.kv_heads, shape.head_dim)
        self.caches = [(normal(*size), normal(*size)) for _ in range(sets)]
        self.q = normal(int(self.starts[-1]), shape.heads, shape.head_dim)
        self.gate = normal(int(self.starts[-1]), shape.width) if shape.gated else None

    def opened(self, out: torch.Tensor) -> Tensors:
        """Outputs `[T, heads, head_dim]` through the gate."""
        out = out.flatten(1)
        return (out if self.gate is None else out * self.gate.double().sigmoid(),)


class Decode(Problem):
    """Decode attention, one row a sequence. Configurations: tile, parts, stages, and how parts are combined."""

    def __init__(self, shape: AttentionShape, lengths: Sequence[int]) -> None:
        self.bytes = sum(lengths) * shape.kv_heads * shape.head_dim * 4 + len(lengths) * shape.width * 4
        self.flops = sum(lengths) * shape.width * 4
        self.data = Paged(shape, lengths, [1] * len(lengths), self.sets)
        self.turns = torch.zeros(len(lengths) * shape.kv_heads, dtype=torch.int32, device="cuda")
        self.longest = max(lengths)

    def configs(self) -> Sequence[tuple[DecodeConfig, bool]]:
        """A configuration, and whether parts are combined in turn."""
        shape, count = self.data.shape, len(self.data.lens)
        default = default_decode_config(count, shape.kv_heads, shape.head_dim, self.longest)
        tiles = ((64, 3), (64, 4), (64, 5), (128, 3), (32, 4)) if shape.head_dim <= 128 else ((32, 3), (32, 4), (64, 3), (64, 4))
        most = -(-self.longest // 64)
        splits = sorted({min(most, max(1, split)) for split in (default.splits // 2, default.splits, 2 * default.splits)})
        found: list[tuple[DecodeConfig, bool]] = [(default, True)]
        for tile, stages in tiles:
            for split in splits:
                for in_turn in (True, False) if split > 1 else (True,):
                    found.append((DecodeConfig(tile=tile, splits=split, stages=stages), in_turn))
        return found

    def run(self, config: Any, number: int) -> Tensors:
        """Outputs."""
        chosen, in_turn = config
        data = self.data
        k_cache, v_cache = data.caches[number]
        return (
            paged_decode(
                data.q, k_cache, v_cache, data.tables, data.seq_lens, max_seq=self.longest, gate=data.gate,
                turns=self.turns if in_turn else None, config=chosen,
            ),
        )  # fmt: skip

    def expected(self) -> Tensors:
        """In float64."""
        data = self.data
        k_cache, v_cache = (cache.double() for cache in data.caches[0])
        return data.opened(decode_attention(data.q.double(), k_cache, v_cache, data.tables, data.seq_lens, data.lens, None))


class StepAttention(Problem):
    """A decode step from the projection to the attended row. Configurations: tile, parts, warps, stages, and dependent launch."""

    def __init__(self, shape: AttentionShape, lengths: Sequence[int]) -> None:
        self.bytes = sum(lengths) * shape.kv_heads * shape.head_dim * 4 + len(lengths) * shape.width * 4
        self.flops = sum(lengths) * shape.width * 4
        self.data = data = Paged(shape, lengths, [1] * len(lengths), self.sets)
        self.inputs = Inputs(shape, len(lengths))
        self.projected = self.inputs.qkv[0]
        self.positions = data.seq_lens - 1
        self.cos, self.sin = rotary_cos_sin(self.positions, self.inputs.inv_freq, 1.0)
        blocks = data.tables.gather(1, (self.positions // BLOCK).long()[:, None])[:, 0]
        self.places = blocks.long() * BLOCK + self.positions % BLOCK
        self.turns = torch.zeros(len(lengths) * shape.kv_heads, dtype=torch.int32, device="cuda")
        self.longest = max(lengths)

    def configs(self) -> Sequence[tuple[StepConfig, bool]]:
        """A configuration, and dependent launch."""
        shape, count = self.data.shape, len(self.data.lens)
        default = default_step_config(count, shape.kv_heads, shape.head_dim, self.longest)
        tiles = (
            ((64, 4, 3), (256, 8, 2), (128, 8, 2), (32, 2, 3)) if shape.head_dim <= 128 else ((32, 4, 3), (64, 8, 3), (128, 8, 2))
        )
        splits = sorted({max(1, default.splits // 2), default.splits, 2 * default.splits})
        found = [StepConfig(tile=t, warps=w, stages=s, splits=split) for t, w, s in tiles for split in splits]
        return [(default, False), (default, True), *((config, False) for config in found)]

    def run(self, config: Any, number: int) -> Tensors:
        """Outputs."""
        chosen, pdl = config
        shape, inputs = self.data.shape, self.inputs
        k_cache, v_cache = self.data.caches[number]
        out = attention_step(
            self.projected, self.cos, self.sin, k_cache, v_cache, self.places, self.data.tables, self.data.seq_lens, self.turns,
            heads=shape.heads, max_seq=self.longest, q_norm=inputs.q_norm, k_norm=inputs.k_norm, eps=EPS, gated=shape.gated,
            config=chosen, pdl=pdl,
        )  # fmt: skip
        return (out,)

    def expected(self) -> Tensors:
        """In float64."""
        data, shape, inputs = self.data, self.data.shape, self.inputs
        heads = self.projected.double()[:, : (shape.heads + 2 * shape.kv_heads) * shape.head_dim].unflatten(1, (-1, shape.head_dim))
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        cos, sin = rotary_tables(self.positions, inputs.inv_freq, 1.0, torch.float64)
        q, k = (rotate(rms_norm(x, weight.double(), EPS), cos, sin) for x, weight in ((q, inputs.q_norm), (k, inputs.k_norm)))
        k_cache, v_cache = (cache.double() for cache in data.caches[0])
        write_kv(k_cache, v_cache, k, v, self.places)
        out = decode_attention(q, k_cache, v_cache, data.tables, data.seq_lens, data.lens, None).flatten(1)
        if shape.gated:
            out *= self.projected.double()[:, shape.width + 2 * shape.kv_heads * shape.head_dim :].sigmoid()
        return (out,)


class Prefill(Problem):
    """Attention of prompt pieces. Configurations: tiles."""

    def __init__(self, shape: AttentionShape, lengths: Sequence[int], counts: Sequence[int]) -> None:
        seen = sum(count * (length - (count - 1) / 2) for length, count in zip(lengths, counts, strict=True))
        self.flops = 4 * seen * shape.width
        self.bytes = sum(lengths) * shape.kv_heads * shape.head_dim * 4 + sum(counts) * shape.width * 4
        self.data = Paged(shape, lengths, counts, 2)
        self.tiles: dict[int, torch.Tensor] = {}
        for config in self.configs():
            rows = config.tile_rows(shape.heads // shape.kv_heads)
            self.tiles[rows] = torch.from_numpy(prefill_tiles(self.data.starts, self.data.lens, range(len(lengths)), rows)).cuda()

    @property
    def sets(self) -> int:
        """Arithmetic is what takes the time."""
        return 2

    def configs(self) -> Sequence[PrefillConfig]:
        """Pairs by positions, warps, stages, registers; the default is the first."""
        head_dim = self.data.shape.head_dim
        if head_dim <= 128:
            tiles = ((128, 64, 8, 3, 128), (128, 64, 8, 3, 255), (128, 128, 8, 2, 255), (128, 32, 8, 2, 128), (64, 64, 4, 2, 168))
        else:
            tiles = ((128, 64, 8, 3, 255), (128, 32, 8, 3, 255), (64, 64, 4, 2, 255), (64, 32, 4, 3, 255), (64, 64, 8, 2, 255))
        return [
            default_prefill_config(head_dim),
            *(PrefillConfig(packed=p, tile=t, warps=w, stages=s, registers=r) for p, t, w, s, r in tiles),
        ]

    def run(self, config: Any, number: int) -> Tensors:
        """Outputs."""
        data = self.data
        tiles = self.tiles[config.tile_rows(data.shape.heads // data.shape.kv_heads)]
        return (
            paged_prefill(
                data.q, *data.caches[number], data.tables, data.query_start, data.seq_lens, tiles, gate=data.gate, config=config
            ),
        )  # fmt: skip

    def expected(self) -> Tensors:
        """In float32: float64 takes too long."""
        data = self.data
        k_cache, v_cache = (cache.float() for cache in data.caches[0])
        parts = [
            piece_attention(data.q[start:stop].float(), k_cache, v_cache, data.tables[number], int(data.lens[number]), None)
            for number, (start, stop) in enumerate(zip(data.starts[:-1], data.starts[1:], strict=True))
        ]
        return data.opened(torch.cat(parts).double())


class TorchPrefill(Problem):
    """Torch's own attention of whole prompts of one length whose keys lie in order: a yardstick. Configurations: its kernels."""

    sets = 2

    def __init__(self, shape: AttentionShape, length: int, count: int) -> None:
        self.paged = Prefill(replace(shape, gated=False), [length] * count, [length] * count)
        self.bytes, self.flops = self.paged.bytes, self.paged.flops
        data = self.paged.data
        self.q = data.q.unflatten(0, (count, length)).transpose(1, 2).contiguous()
        in_order = [[cache[data.tables.long()].flatten(1, 2) for cache in pair] for pair in data.caches]
        self.keys, self.values = ([pair[i].transpose(1, 2).contiguous() for pair in in_order] for i in range(2))

    def configs(self) -> Sequence[Any]:
        """Kernels."""
        return (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)

    def run(self, config: Any, number: int) -> Tensors:
        """Outputs."""
        with sdpa_kernel(config):
            out = scaled_dot_product_attention(self.q, self.keys[number], self.values[number], is_causal=True, enable_gqa=True)
        return (out.transpose(1, 2).flatten(0, 1).flatten(1),)

    def expected(self) -> Tensors:
        """As of ours."""
        return self.paged.expected()
