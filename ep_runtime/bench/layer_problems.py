"""Problems of the layer kernels: random data of real models' shapes, candidate configurations, and a reference for each.

A problem has several sets of data, so that repeated calls do not find theirs in the L2 cache. References are those of package
`kernels` on the same values in float32 or float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.causal_conv import conv_piece, conv_step
from kernels.delta_chunk_triton import default_chunk_config, delta_pieces
from kernels.delta_decode_triton import DeltaDecodeConfig, DeltaWeights, delta_decode
from kernels.delta_plan import delta_plan
from kernels.gated_delta import delta_chunks, delta_gate, delta_inputs, delta_step
from kernels.paged_attention import decode_attention, piece_attention, write_kv
from kernels.paged_decode_triton import DecodeConfig, default_decode_config, paged_decode
from kernels.paged_prefill_triton import PrefillConfig, default_prefill_config, paged_prefill, prefill_tiles
from kernels.paged_step_triton import StepConfig, attention_step, default_step_config
from kernels.rms_norm import gated_rms_norm, rms_norm
from kernels.rms_norm_triton import add_norm_rows
from kernels.rotary import rotary_tables, rotate
from kernels.rotary_triton import attention_inputs, rotary_cos_sin

BLOCK = 16
EPS = 1e-6
TARGET_BYTES = 256 << 20
"""Data of all sets together: several times the L2 cache."""

Tensors = tuple[torch.Tensor, ...]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Standard normal values on the device."""
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


class Problem(ABC):
    """One operator at one shape. `bytes` and `flops` are the least that a call must move and do."""

    bytes: float
    flops: float = 0.0
    tolerance = 1e-2

    @property
    def sets(self) -> int:
        """How many sets of data the calls rotate over."""
        return int(max(2, min(24, TARGET_BYTES // self.bytes)))

    @abstractmethod
    def configs(self) -> Sequence[Any]:
        """Candidates; the first is the default."""

    @abstractmethod
    def run(self, config: Any, number: int) -> Tensors:
        """Call the kernels on a set of data -> what they wrote."""

    @abstractmethod
    def expected(self) -> Tensors:
        """What the first set's run must write, from its values before any run."""

    def reset(self) -> None:  # noqa: B027
        """Give the first set its values before any run, where a run changes what it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Attention of one layer; the gate, where there is one, multiplies its output."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    gated: bool

    @property
    def width(self) -> int:
        """Elements of a row's output."""
        return self.heads * self.head_dim


QWEN3 = AttentionShape(heads=32, kv_heads=4, head_dim=128, rotary_dim=128, gated=False)
NEXT = AttentionShape(heads=16, kv_heads=2, head_dim=256, rotary_dim=64, gated=True)


def halved(shape: AttentionShape) -> AttentionShape:
    """What one of two ranks has where heads are divided."""
    return replace(shape, heads=shape.heads // 2, kv_heads=shape.kv_heads // 2)


class AddNorm(Problem):
    """Residual addition and RMSNorm. Configurations: with and without dependent launch."""

    def __init__(self, rows: int, hidden: int) -> None:
        self.bytes = rows * hidden * 2 * 4
        self.x = [normal(rows, hidden) for _ in range(self.sets)]
        self.delta, self.weight = normal(rows, hidden), normal(hidden)
        self.before = self.x[0].clone()

    def configs(self) -> Sequence[bool]:
        """Dependent launch."""
        return (False, True)

    def run(self, config: Any, number: int) -> Tensors:
        """x and its norm. Timed runs keep adding: the data stay finite."""
        return add_norm_rows(self.x[number], self.delta, self.weight, EPS, pdl=config), self.x[number]

    def expected(self) -> Tensors:
        """The sum is rounded before it is normalised."""
        total = (self.before.double() + self.delta.double()).to(torch.bfloat16)
        return rms_norm(total.double(), self.weight.double(), EPS), total

    def reset(self) -> None:
        """x before the addition."""
        self.x[0].copy_(self.before)


class Inputs(Problem):
    """Norms of heads, rotary embedding, cache write. Configurations: heads a program, dependent launch."""

    def __init__(self, shape: AttentionShape, rows: int) -> None:
        self.shape, self.rows = shape, rows
        width = (shape.heads * (2 if shape.gated else 1) + 2 * shape.kv_heads) * shape.head_dim
        self.bytes = rows * (shape.heads + 2 * shape.kv_heads) * shape.head_dim * 4
        self.qkv = [normal(rows, width) for _ in range(self.sets)]
        self.q_norm, self.k_norm = normal(shape.head_dim), normal(shape.head_dim)
        blocks = -(-rows // BLOCK) + 3
        self.caches = [normal(2, blocks, BLOCK, shape.kv_heads, shape.head_dim).unbind(0) for _ in range(self.sets)]
        self.positions = torch.randint(0, 4096, (rows,), device="cuda", dtype=torch.int32)
        self.places = torch.randperm(blocks * BLOCK, device="cuda")[:rows]
        self.inv_freq = 1e6 ** -torch.linspace(0, 1, shape.rotary_dim // 2, device="cuda")
        self.cos, self.sin = rotary_cos_sin(self.positions, self.inv_freq, 1.0)

    def configs(self) -> Sequence[tuple[int | None, bool]]:
        """Heads a program, and dependent launch."""
        return ((None, False), (None, True), (2, False), (4, False), (8, False), (16, False))

    def run(self, config: Any, number: int) -> Tensors:
        """Queries, and the keys and values at the rows' places."""
        k_cache, v_cache = self.caches[number]
        block_heads, pdl = config
        q = attention_inputs(
            self.qkv[number], self.cos, self.sin, k_cache, v_cache, self.places, heads=self.shape.heads,
            q_norm=self.q_norm, k_norm=self.k_norm, eps=EPS, block_heads=block_heads, pdl=pdl,
        )  # fmt: skip
        return q, k_cache, v_cache

    def expected(self) -> Tensors:
        """In float64, the tables in float32 as everywhere."""
        shape = self.shape
        heads = self.qkv[0].double()[:, : (shape.heads + 2 * shape.kv_heads) * shape.head_dim].unflatten(1, (-1, shape.head_dim))
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        cos, sin = rotary_tables(self.positions, self.inv_freq, 1.0, torch.float64)
        q, k = (rotate(rms_norm(x, weight.double(), EPS), cos, sin) for x, weight in ((q, self.q_norm), (k, self.k_norm)))
        caches = [cache.double() for cache in self.caches[0]]
        write_kv(caches[0], caches[1], k, v, self.places)
        return q, caches[0], caches[1]


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


KEY_HEADS, VALUE_HEADS, DIM, TAPS = 16, 32, 128, 4
"""Gated DeltaNet of Qwen3-Next and Qwen3.5-35B."""
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM
WIDTH = VALUE_HEADS * DIM


class Delta(Problem):
    """Gated DeltaNet of some spans, of one row each (decode) or of more (pieces)."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts, self.decode = counts, max(counts) == 1
        rows, spans = sum(counts), len(counts)
        self.bytes = spans * VALUE_HEADS * DIM * DIM * 8 + rows * (CHANNELS + 2 * WIDTH) * 2
        if not self.decode:
            self.flops = rows * VALUE_HEADS * (4 * DIM * DIM + 64 * 6 * DIM) * 2.0
        self.weights = DeltaWeights(
            normal(CHANNELS, TAPS),
            normal(VALUE_HEADS, dtype=torch.float32) * 0.5,
            normal(VALUE_HEADS, dtype=torch.float32),
            normal(DIM),
            EPS,
        )
        self.projected = normal(rows, CHANNELS + WIDTH + 2 * VALUE_HEADS)
        self.slots = torch.randperm(spans, device="cuda", dtype=torch.int32)
        self.conv = [normal(spans, CHANNELS, TAPS - 1) for _ in range(self.sets)]
        self.h = [normal(spans, VALUE_HEADS, DIM, DIM, dtype=torch.float32) for _ in range(self.sets)]
        self.before = (self.conv[0].clone(), self.h[0].clone())
        self.turns = torch.zeros(spans * KEY_HEADS, dtype=torch.int32, device="cuda")
        self.starts = np.concatenate(([0], np.cumsum(counts)))
        self.plan = delta_plan(self.starts, range(spans), "cuda")

    def configs(self) -> Sequence[Any]:
        """(Schedule, dependent launch) for decode, the three kernels' schedules for pieces."""
        if self.decode:
            sizes = ((4, 0, 240), (4, 32, 240), (4, 32, None), (8, 16, 128))
            configs = [DeltaDecodeConfig(warps=warps, columns=columns, registers=most) for warps, columns, most in sizes]
            return [(config, pdl) for config in configs for pdl in (False, True)]
        default = default_chunk_config(DIM, self.projected.dtype)
        states = [(16, 4, 3), (32, 4, 2), (32, 4, 4), (64, 4, 2), (64, 8, 2), (32, 8, 3)]
        found_chunks = [replace(default, tile=tile, state_warps=warps, state_stages=stages) for tile, warps, stages in states]
        return [default, *found_chunks, replace(default, registers=None), replace(default, output_warps=4)]

    def run(self, config: Any, number: int) -> Tensors:
        """Outputs and both pools."""
        conv, h = self.conv[number], self.h[number]
        if self.decode:
            chosen, pdl = config
            call: Callable[[], torch.Tensor] = partial(delta_decode, turns=self.turns, config=chosen, pdl=pdl)
        else:
            call = partial(delta_pieces, plan=self.plan, config=config)
        return call(self.projected, conv, h, self.slots, self.weights, key_heads=KEY_HEADS), conv, h  # type: ignore[call-arg]

    def expected(self) -> Tensors:
        """In float32, from the pools as they were."""
        conv, h = (pool.clone() for pool in self.before)
        weights = self.weights
        mixed, z, b, a = self.projected.float().split((CHANNELS, WIDTH, VALUE_HEADS, VALUE_HEADS), 1)
        g, beta = delta_gate(a, weights.a_log, weights.dt_bias), b.sigmoid()
        conv = conv.float()
        outputs = []
        index = self.slots.long()
        if self.decode:
            convolved, after = conv_step(mixed, conv[index], weights.conv.float())
            out, state = delta_step(*self._heads(convolved), g, beta, h[index])
            outputs.append(out)
            conv[index], h[index] = after, state
        else:
            for number, slot in enumerate(self.slots.tolist()):
                part = slice(int(self.starts[number]), int(self.starts[number + 1]))
                convolved, conv[slot] = conv_piece(mixed[part], conv[slot], weights.conv.float())
                out, h[slot] = delta_chunks(*self._heads(convolved), g[part], beta[part], h[slot])
                outputs.append(out)
        out = gated_rms_norm(torch.cat(outputs), z.unflatten(1, (-1, DIM)), weights.norm.float(), EPS)
        return out.flatten(1), conv, h

    def reset(self) -> None:
        """The pools before any step."""
        self.conv[0].copy_(self.before[0])
        self.h[0].copy_(self.before[1])

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = convolved.split((KEY_HEADS * DIM, KEY_HEADS * DIM, WIDTH), 1)
        q, k = delta_inputs(q.unflatten(1, (-1, DIM)), k.unflatten(1, (-1, DIM)), VALUE_HEADS)
        return q, k, v.unflatten(1, (-1, DIM))


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "add + norm 1 x 2048": partial(AddNorm, 1, 2048),
    "add + norm 128 x 2048": partial(AddNorm, 128, 2048),
    "add + norm 4096 x 2048": partial(AddNorm, 4096, 2048),
    "inputs Qwen3 1": partial(Inputs, QWEN3, 1),
    "inputs Qwen3 128": partial(Inputs, QWEN3, 128),
    "inputs Qwen3 4096": partial(Inputs, QWEN3, 4096),
    "inputs Next 128": partial(Inputs, NEXT, 128),
    "decode Qwen3 1 x 256": partial(Decode, QWEN3, [256]),
    "decode Qwen3 8 x 256": partial(Decode, QWEN3, [256] * 8),
    "decode Qwen3 32 x 256": partial(Decode, QWEN3, [256] * 32),
    "decode Qwen3 128 x 256": partial(Decode, QWEN3, [256] * 128),
    "decode Qwen3 1 x 32768": partial(Decode, QWEN3, [32768]),
    "decode Qwen3 32 x 4096": partial(Decode, QWEN3, [4096] * 32),
    "decode Qwen3 mixed": partial(Decode, QWEN3, [16384, *[256] * 31, 4096, 4096]),
    "decode Next 1 x 256": partial(Decode, NEXT, [256]),
    "decode Next 128 x 256": partial(Decode, NEXT, [256] * 128),
    "decode Next 32 x 4096": partial(Decode, NEXT, [4096] * 32),
    "step Qwen3 1 x 256": partial(StepAttention, QWEN3, [256]),
    "step Qwen3 128 x 256": partial(StepAttention, QWEN3, [256] * 128),
    "step Qwen3 1 x 8192": partial(StepAttention, QWEN3, [8192]),
    "step Next 1 x 256": partial(StepAttention, NEXT, [256]),
    "step Next 128 x 1024": partial(StepAttention, NEXT, [1024] * 128),
    "prefill Qwen3 1 x 4096": partial(Prefill, QWEN3, [4096], [4096]),
    "prefill Qwen3 2 x 4096": partial(Prefill, QWEN3, [4096] * 2, [4096] * 2),
    "prefill Qwen3 8 x 1024": partial(Prefill, QWEN3, [1024] * 8, [1024] * 8),
    "prefill Qwen3 32 x 256": partial(Prefill, QWEN3, [256] * 32, [256] * 32),
    "prefill Qwen3 512 at 16384": partial(Prefill, QWEN3, [16384], [512]),
    "prefill Qwen3 half 2 x 4096": partial(Prefill, halved(QWEN3), [4096] * 2, [4096] * 2),
    "prefill Next 1 x 4096": partial(Prefill, NEXT, [4096], [4096]),
    "prefill Next 8 x 1024": partial(Prefill, NEXT, [1024] * 8, [1024] * 8),
    "prefill Next half 2 x 4096": partial(Prefill, halved(NEXT), [4096] * 2, [4096] * 2),
    "prefill torch Qwen3 2 x 4096": partial(TorchPrefill, QWEN3, 4096, 2),
    "prefill torch Next 2 x 4096": partial(TorchPrefill, NEXT, 4096, 2),
    "delta 1": partial(Delta, [1]),
    "delta 8": partial(Delta, [1] * 8),
    "delta 32": partial(Delta, [1] * 32),
    "delta 128": partial(Delta, [1] * 128),
    "delta 1 x 4096": partial(Delta, [4096]),
    "delta 8 x 1024": partial(Delta, [1024] * 8),
    "delta ragged": partial(Delta, [63, 65, 2, 1000]),
}
"""Name -> how to make it."""
