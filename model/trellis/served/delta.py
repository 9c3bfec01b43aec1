"""Gated DeltaNet over slots: rows of one-row spans together, pieces one by one. States of rows that do not run keep their bits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.causal_conv import conv_piece, conv_step
from kernels.gated_delta import delta_chunks, delta_step
from model.trellis.delta import GatedDelta
from model.trellis.projection import Tuning
from model.trellis.served.rows import Rows, Singles


class Pools(NamedTuple):
    """One instance's states: `conv [max_slots, channels, kernel - 1]`, oldest first, and `h [max_slots, heads, dk, dv]` float32."""

    conv: torch.Tensor
    h: torch.Tensor


class Inputs(NamedTuple):
    """What the recurrence is given: `u [m, channels]`, `g` and `beta [m, heads]`."""

    u: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def rows(self, at: torch.Tensor | slice) -> Inputs:
        """Some of the rows."""
        return Inputs(self.u[at], self.g[at], self.beta[at])


def mix_slots(mixer: GatedDelta, x: torch.Tensor, tuning: Tuning, pools: Pools, rows: Rows) -> torch.Tensor:
    """`x [m, d] -> [m, d]`; the slots' states become those after their last row."""
    inputs, weight = Inputs(*mixer.inputs(x, tuning)), mixer.conv_weight()
    singles = rows.singles
    if singles is not None and singles.at is None:
        return mixer.outputs(_step(mixer, inputs, weight, pools, singles), x.dtype)
    out = inputs.g.new_empty(x.shape[0], mixer.heads, mixer.value_dim)
    if singles is not None and singles.at is not None:
        out[singles.at] = _step(mixer, inputs.rows(singles.at), weight, pools, singles)
    for piece in rows.pieces:
        part = slice(piece.start, piece.stop)
        out[part] = _run(mixer, inputs.rows(part), weight, Pools(*(pool[piece.slot] for pool in pools)))
    return mixer.outputs(out, x.dtype)


def _step(mixer: GatedDelta, inputs: Inputs, weight: torch.Tensor, pools: Pools, singles: Singles) -> torch.Tensor:
    """One row of each sequence -> `[n, heads, dv]`."""
    conv, h = (pool.index_select(0, singles.slots) for pool in pools)
    y, conv_after = conv_step(inputs.u, conv, weight)
    o, h_after = delta_step(*mixer.heads_of(y), inputs.g, inputs.beta, h)
    _keep(pools.conv, conv, conv_after, singles)
    _keep(pools.h, h, h_after, singles)
    return o


def _run(mixer: GatedDelta, inputs: Inputs, weight: torch.Tensor, slot: Pools) -> torch.Tensor:
    """Several rows of one sequence -> `[m, heads, dv]`."""
    y, conv = conv_piece(inputs.u, slot.conv, weight)
    o, h = delta_chunks(*mixer.heads_of(y), inputs.g, inputs.beta, slot.h)
    slot.conv.copy_(conv)
    slot.h.copy_(h)
    return o


def _keep(pool: torch.Tensor, before: torch.Tensor, after: torch.Tensor, singles: Singles) -> None:
    """Write states back. An idle row writes what its source does, to the same place: equal values, in whatever order."""
    slots = singles.slots
    if singles.idle is not None:
        live, source = singles.idle
        after = torch.where(live.view(-1, *(1 for _ in after.shape[1:])), after, before).index_select(0, source)
        slots = slots.index_select(0, source)
    pool.index_copy_(0, slots, after)
