"""The product-key memory bank (arXiv 1907.05242): sparse reads from a large value table, found through two small sets of keys.

    q = unit_rms(reshape(W_q unit_rms(h), [heads, 2, dk]))             each half normed by itself
    s_z[i] = <q_z, sub_keys[z, i]> dk^-1/2,  I_z = top-k of s_z        equal scores: lower i
    cand(i, j) = s_0[i] + s_1[j], i in I_0, j in I_1                   slot = i * sub_keys + j
    idx = top-k of cand                                                equal scores: lower slot
    w = softmax(cand[idx]) (1 - exp(min(cand[idx]) - cand[idx]))
    h <- h + W_o sum_heads,k w values[idx]

The last selected slot weighs nothing, so a read is continuous in the scores: a near tie at the end of the selection that falls the
other way moves it by a rounding, not by a row. `BankWeighting.SOFTMAX` leaves that factor out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from model.trellis.bank_shards import Reduce, finish, keep, local_part
from model.trellis.config import BANK_READ_POINTS, TrellisConfig
from model.trellis.errors import ModelConfigError
from model.trellis.norm import Gain, unit_rms, wide
from model.trellis.output import BankReadout
from model.trellis.projection import Projection
from model.trellis.settings import BankWeighting, ModelSettings


@dataclass(frozen=True, slots=True)
class Shard:
    """Which rows of the value table are here: slots of `rank` modulo `world`; and the sum over all ranks."""

    rank: int
    world: int
    reduce: Reduce


WHOLE = Shard(0, 1, keep)
"""All rows are here."""


class ReadPoint(nn.Module):
    """The projections of one place where the bank is read."""

    def __init__(self, config: TrellisConfig) -> None:
        super().__init__()
        self.q_proj = Projection(config.d_model, config.bank_heads * 2 * config.bank_key_dim)
        self.o_proj = Projection(config.bank_value_dim, config.d_model)
        self.read_norm = Gain(config.bank_value_dim, eps=config.eps) if config.bank_read_norm else None


class MemoryBank(nn.Module):
    """One value table and one set of keys, shared by the read points and heads."""

    def __init__(self, config: TrellisConfig, settings: ModelSettings, shard: Shard = WHOLE) -> None:
        super().__init__()
        if config.bank_slots % shard.world or not 0 <= shard.rank < shard.world:
            raise ModelConfigError(f"{config.bank_slots} slots are not shared out to rank {shard.rank} of {shard.world}")
        self.values = nn.Parameter(torch.empty(config.bank_slots // shard.world, config.bank_value_dim))
        self.sub_keys = nn.Parameter(torch.empty(2, config.bank_sub_keys, config.bank_key_dim))
        self.points = nn.ModuleList([ReadPoint(config) for _ in range(BANK_READ_POINTS)])
        self.heads, self.top_k, self.slots, self.eps = config.bank_heads, config.bank_top_k, config.bank_slots, config.eps
        self.settings = settings
        self.shard = shard

    def forward(self, point: int, h: torch.Tensor) -> tuple[torch.Tensor, BankReadout]:
        """`h [B, n, d]` after the read, and what was read."""
        indices, weights = self.select(point, h)
        readout = BankReadout(indices=indices, weights=weights.detach(), slots=self.slots)
        if self.settings.bank_force_zero_delta:
            # On every rank alike, so none waits in the reduction.
            return h + torch.zeros_like(h), readout
        return self.add(point, h, self.gather(indices, weights)), readout

    def select(self, point: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot numbers int64 and weights (at least float32), both `[B, n, heads, top_k]`, from replicated tensors alone."""
        dtype = wide(h.dtype)
        q = self._point(point).q_proj(unit_rms(h, self.eps).to(h.dtype)).unflatten(-1, (self.heads, 2, -1))
        q = unit_rms(q, self.eps)
        scores = torch.einsum("bthzc,zic->bthzi", q, self.sub_keys.to(dtype)) * q.shape[-1] ** -0.5
        # Ascending by number within each half makes the grid of candidates ascending by slot, so one stable sort breaks ties.
        near = _best(scores.detach(), self.top_k).sort(-1).values
        best = scores.gather(-1, near)
        grid = (best[..., 0, :, None] + best[..., 1, None, :]).flatten(-2)
        slots = (near[..., 0, :, None] * self.sub_keys.shape[1] + near[..., 1, None, :]).flatten(-2)
        chosen = _best(grid.detach(), self.top_k)
        return slots.gather(-1, chosen), bank_weights(grid.gather(-1, chosen), self.settings.bank_weighting)

    def gather(self, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of values over heads and slots: `[B, n, value_dim]`, at least float32."""
        return finish(self.settings.bank_shard_mode, self.shard.reduce(self.part(indices, weights)), weights.flatten(-2))

    def part(self, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What this rank's rows give to that sum, in the form that its mode reduces."""
        mode, shard = self.settings.bank_shard_mode, self.shard
        return local_part(mode, self.values, indices.flatten(-2), weights.flatten(-2), shard.rank, shard.world)

    def add(self, point: int, h: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        """`h [..., d]` with what was read, `[..., value_dim]`."""
        read_point, read = self._point(point), read.to(h.dtype)
        if read_point.read_norm is not None:
            read = read_point.read_norm(read)
        return h + read_point.o_proj(read)

    def _point(self, number: int) -> ReadPoint:
        point = self.points[number]
        assert isinstance(point, ReadPoint)
        return point


def bank_weights(scores: torch.Tensor, weighting: str) -> torch.Tensor:
    """Weights of selected slots from their scores `[..., top_k]`."""
    weights = scores.softmax(-1)
    if weighting == BankWeighting.SOFTMAX:
        return weights
    return weights * -torch.expm1(scores.amin(-1, keepdim=True) - scores)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Numbers of the `count` largest along the last axis, best first, equal ones by number."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
