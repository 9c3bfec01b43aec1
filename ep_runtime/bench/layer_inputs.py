"""Problems of what a layer does row by row before it attends: residual and norm, and the inputs of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ep_runtime.bench.layer_problem import EPS, Problem, Tensors, normal
from kernels.paged_attention import write_kv
from kernels.rms_norm import rms_norm
from kernels.rms_norm_triton import add_norm_rows
from kernels.rotary import rotary_tables, rotate
from kernels.rotary_triton import attention_inputs, rotary_cos_sin

BLOCK = 16
"""Positions of a cache block."""


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
