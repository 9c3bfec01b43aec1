"""The problem of Gated DeltaNet: decode steps and pieces of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ep_runtime.bench.layer_problem import EPS, Problem, Tensors, normal
from kernels.causal_conv import conv_piece, conv_step
from kernels.delta_chunk_triton import default_chunk_config, delta_pieces
from kernels.delta_decode_triton import DeltaDecodeConfig, DeltaWeights, delta_decode
from kernels.delta_plan import delta_plan
from kernels.gated_delta import delta_chunks, delta_gate, delta_inputs, delta_step
from kernels.rms_norm import gated_rms_norm

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
