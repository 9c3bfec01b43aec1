"""Routed experts on the GPU: this rank's weighted sum, in a form and with tiles that follow from shapes alone.

The same sum as `kernels.experts`, which is the specification. Nothing waits for the device, so that it can be captured in a graph.
"""

from __future__ import annotations

import torch

from kernels.experts_config import ExpertsConfig, default_config
from kernels.experts_grouped import combine, down_grouped, gate_up_grouped
from kernels.experts_paired import down_paired, gate_up_paired
from kernels.experts_persistent import down_persistent, gate_up_persistent
from kernels.grouping import Groups, group_pairs
from kernels.pairs import MOST_CHOICES, Pairs


def moe_pairs(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    local: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    config: ExpertsConfig | None = None,
    groups: Groups | None = None,
) -> torch.Tensor | Pairs:
    """`moe_experts` in x's dtype without the sum over a row's choices, where that would be a launch of its own."""
    rows, top_k = experts.shape
    held = gate_up.shape[0]
    config = config or default_config(rows, top_k, held)
    if rows == 0 or held == 0 or config.form == "paired" or top_k > MOST_CHOICES:
        return moe_experts(x, experts, weights, local, gate_up, down, config=config, groups=groups)
    _check(x, experts, weights, gate_up, down)
    return Pairs(_grouped_pairs(x, experts, weights, local, gate_up, down, config, groups), experts, local)


def moe_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    local: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    config: ExpertsConfig | None = None,
    groups: Groups | None = None,
) -> torch.Tensor:
    """This rank's partial sum `[T, H]`, in `out_dtype` (x's when None).

    x `[T, H]`; experts `[T, k]` int32 or int64; weights `[T, k]` float32; local `[num_experts]`: an expert's index here, or -1;
    gate_up `[E, 2 I, H]` and down `[E, H, I]`, all contiguous. `config` is `default_config` of the shape when None; `groups`, of
    the same pairs and with the config's block of rows, saves the launch that makes them. Raises ValueError for other layouts.
    """
    rows, top_k = experts.shape
    held = gate_up.shape[0]
    out = torch.empty(rows, x.shape[1], dtype=out_dtype or x.dtype, device=x.device)
    if rows == 0 or held == 0:
        return out.zero_()
    _check(x, experts, weights, gate_up, down)
    config = config or default_config(rows, top_k, held)
    if config.form == "paired":
        units = gate_up_paired(x, experts, local, gate_up, config.gate_up, pdl=config.pdl)
        down_paired(units, experts, weights, local, down, out, config.down, pdl=config.pdl)
        return out
    pairs = _grouped_pairs(x, experts, weights, local, gate_up, down, config, groups)
    combine(pairs, experts, local, out, pdl=config.pdl)
    return out


def _grouped_pairs(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    local: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    config: ExpertsConfig,
    groups: Groups | None,
) -> torch.Tensor:
    """Weighted outputs `[P, H]` of all pairs whose expert is held here, in x's dtype."""
    pairs, held, block_rows = experts.numel(), gate_up.shape[0], config.gate_up.block_m
    if groups is None:
        groups = group_pairs(experts, local, held, block_rows)
    elif (groups.pairs, groups.held, groups.block_rows) != (pairs, held, block_rows):
        raise ValueError(f"{groups.pairs} pairs in blocks of {groups.block_rows} rows; want {pairs} in blocks of {block_rows}")
    first = gate_up_persistent if config.gate_up.persistent else gate_up_grouped
    second = down_persistent if config.down.persistent else down_grouped
    units = first(x, gate_up, groups, experts.shape[1], config.gate_up, pdl=config.pdl)
    return second(units, weights, down, groups, config.down, pdl=config.pdl)


def _check(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    held, twice, hidden = gate_up.shape
    if x.shape != (experts.shape[0], hidden) or down.shape != (held, hidden, twice // 2) or weights.shape != experts.shape:
        raise ValueError(f"shapes do not agree: {[tuple(t.shape) for t in (x, experts, weights, gate_up, down)]}")
    if weights.dtype != torch.float32:
        raise ValueError(f"weights are {weights.dtype}, not float32")
    for name, tensor in (("x", x), ("experts", experts), ("weights", weights), ("gate_up", gate_up), ("down", down)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
