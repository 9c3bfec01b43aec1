"""The value table over P ranks: slot s is row s // P of rank s mod P, each rank reads its own rows, and one reduction adds up.

| mode | reduced per token and read point | result |
|---|---|---|
| sum | partial sums, value_dim floats | the order of additions depends on P: equal up to rounding |
| fixed | partial sums of rint(2^32 w v) as int64 | the same bits for every P and order of reduction; sums below 2^31; no gradient |
| rows | the rows, zeros where another rank has them | the bits of the whole table, since x + 0 = x |

Interleaved, since contiguous ranges would tie ownership to the first key half, and one hot key would load one rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from model.trellis.errors import ModelConfigError
from model.trellis.norm import wide
from model.trellis.settings import ShardMode

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""The sum of all ranks' tensors."""
_SCALE = 2.0**32


def keep(part: torch.Tensor) -> torch.Tensor:
    """The sum over one rank."""
    return part


def shard_rows(values: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """The rows of a rank, in their order there."""
    return values[rank::world]


def local_part(
    mode: str, values: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, rank: int, world: int
) -> torch.Tensor:
    """What this rank gives to the reduction, from its rows `values` and slots and weights `[..., k]` of the whole table."""
    dtype = wide(values.dtype)
    if world == 1:
        rows = values[indices].to(dtype)
    else:
        own = (indices % world == rank).unsqueeze(-1)
        rows = torch.where(own, values[torch.where(own.squeeze(-1), indices // world, 0)].to(dtype), 0.0)
    if mode == ShardMode.ROWS:
        return rows
    if mode == ShardMode.FIXED:
        if torch.is_grad_enabled() and (rows.requires_grad or weights.requires_grad):
            raise ModelConfigError("bank_shard_mode 'fixed' has no gradient: train with 'sum' or 'rows', serve under no_grad")
        return ((weights.unsqueeze(-1) * rows).double() * _SCALE).round().to(torch.int64).sum(-2)
    return _weighted(rows, weights)


def finish(mode: str, reduced: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`[..., value_dim]` from the reduced tensor."""
    if mode == ShardMode.ROWS:
        return _weighted(reduced, weights)
    if mode == ShardMode.FIXED:
        return (reduced.double() / _SCALE).to(weights.dtype)
    return reduced


def _weighted(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights.unsqueeze(-2) @ rows).squeeze(-2)
