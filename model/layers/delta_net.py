"""Gated DeltaNet: a convolution over the last tokens and a matrix-valued recurrence, both carried in the slot pool."""

from __future__ import annotations

import torch

from kernels.causal_conv import conv_piece, conv_step
from kernels.gated_delta import delta_chunks, delta_gate, delta_inputs, delta_step
from model.config import ModelConfig
from model.errors import UnsupportedModel
from model.layers.build import Build
from model.layers.module import StepModule
from model.layers.norm import GatedRMSNorm
from model.layers.step import Step

CONV, H = "conv", "h"
"""Names of the states that a layer keeps per sequence."""


class GatedDeltaNet(StepModule):
    """One fused projection gives queries, keys, values (the convolution's channels), the output gate z, beta and decay inputs."""

    def __init__(self, number: int, config: ModelConfig, build: Build) -> None:
        super().__init__()
        if config.delta is None:
            raise UnsupportedModel(f"layer {number} is linear_attention, but the configuration has no linear_* sizes")
        shape = config.delta
        self.number = number
        self.shape = shape
        self.parts = (shape.conv_width, shape.value_width, shape.value_heads, shape.value_heads)
        self.projection = build.linear(config.hidden_size, sum(self.parts))
        self.conv = build.vector(shape.conv_width, shape.kernel)
        self.a_log = build.vector(shape.value_heads, dtype=torch.float32)
        self.dt_bias = build.vector(shape.value_heads, dtype=torch.float32)
        self.norm = GatedRMSNorm(shape.value_dim, config.norm_eps, build)
        self.out = build.linear(shape.value_width, config.hidden_size)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`; the slots' states become those after their last row."""
        linear = step.operators.linear
        return linear(self.out, step.operators.delta(self, linear(self.projection, x, step), step), step)

    def mix(self, projected: torch.Tensor, step: Step) -> torch.Tensor:
        """The torch form of everything between the two projections: `[T, value_heads * value_dim]`."""
        shape, batch = self.shape, step.batch
        mixed, z, b, a = projected.split(self.parts, 1)
        g, beta = delta_gate(a, self.a_log, self.dt_bias), b.float().sigmoid()
        if batch.decode_only:
            out = self._singles(mixed, g, beta, batch.slots, step)
        else:
            out = mixed.new_empty(mixed.shape[0], shape.value_heads, shape.value_dim)
            rows = batch.single_rows
            if rows is not None and batch.single_spans is not None and len(rows):
                slots = batch.slots.index_select(0, batch.single_spans)
                out.index_copy_(0, rows, self._singles(mixed[rows], g[rows], beta[rows], slots, step))
            slots_on_host = batch.host.slots.tolist()
            for piece in batch.host.pieces:
                part = slice(piece.start, piece.stop)
                out[part] = self._piece(mixed[part], g[part], beta[part], slots_on_host[piece.span], step)
        return self.norm(out, z.unflatten(1, out.shape[1:])).flatten(1)

    def _singles(self, mixed: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, slots: torch.Tensor, step: Step) -> torch.Tensor:
        """One row a sequence -> `[S, value_heads, value_dim]` in the model's dtype."""
        conv, h = step.state.recurrent(self.number, CONV), step.state.recurrent(self.number, H)
        index = slots.long()
        out, conv_after = conv_step(mixed, conv.index_select(0, index), self.conv)
        q, k, v = self._heads(out)
        out, h_after = delta_step(q, k, v, g, beta, h.index_select(0, index))
        conv.index_copy_(0, index, conv_after)
        h.index_copy_(0, index, h_after)
        return out.to(mixed.dtype)

    def _piece(self, mixed: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, slot: int, step: Step) -> torch.Tensor:
        """Several rows of one sequence -> `[T, value_heads, value_dim]` in the model's dtype."""
        conv, h = step.state.recurrent(self.number, CONV)[slot], step.state.recurrent(self.number, H)[slot]
        out, conv_after = conv_piece(mixed, conv, self.conv)
        q, k, v = self._heads(out)
        out, h_after = delta_chunks(q, k, v, g, beta, h)
        conv.copy_(conv_after)
        h.copy_(h_after)
        return out.to(mixed.dtype)

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Float32 queries, keys `[T, value_heads, key_dim]` and values `[T, value_heads, value_dim]`."""
        shape = self.shape
        q, k, v = convolved.split((shape.key_width, shape.key_width, shape.value_width), 1)
        per_key = (shape.key_heads, shape.key_dim)
        q, k = delta_inputs(q.unflatten(1, per_key), k.unflatten(1, per_key), shape.value_heads)
        return q, k, v.unflatten(1, (shape.value_heads, shape.value_dim)).float()
