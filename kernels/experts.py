"""Routed experts: the weighted sum, over the experts that this rank holds, of `down(silu(gate x) * up x)`.

Shape letters: T rows, k experts a row, E experts held here, H hidden, I units. Weights are `gate_up [E, 2 I, H]` (gate first) and
`down [E, H, I]`. The four forms compute the same sum; `plan_experts` chooses one from shapes alone.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

import torch
from torch.nn import functional


class ExpertForm(Enum):
    """How the sum is computed."""

    NONE = auto()
    """No expert is held here."""
    DENSE = auto()
    """Every expert runs on every row; those not chosen have weight zero. Reads all weights once; waits for nothing."""
    GATHERED = auto()
    """The chosen experts' weights are copied out for each (row, choice). Waits for nothing; for few rows on a GPU."""
    LISTED = auto()
    """A product for each (row, choice), from a host list of choices; for few rows on the CPU."""
    GROUPED = auto()
    """Rows are sorted by expert, one product for each expert that was hit; the host waits for the counts."""


FEW_PAIRS = 16
"""Up to this many (row, choice) pairs, products of one row each are no slower than sorting (measured on the CPU)."""

DENSE_ROWS = 256
"""Up to this many rows a GPU is bound by reading the weights, and running every expert on every row costs no time."""


def plan_experts(rows: int, top_k: int, num_experts: int, held: int, *, on_host: bool, may_wait: bool) -> ExpertForm:
    """The form for this shape. `on_host`: tensors are in host memory; `may_wait`: the host may wait for the device."""
    pairs = rows * top_k
    if held == 0 or rows == 0:
        return ExpertForm.NONE
    if top_k == num_experts:
        return ExpertForm.DENSE
    if on_host:
        return ExpertForm.LISTED if pairs <= FEW_PAIRS else ExpertForm.GROUPED
    if 2 * pairs <= held:
        return ExpertForm.GATHERED
    return ExpertForm.GROUPED if may_wait and rows > DENSE_ROWS else ExpertForm.DENSE


class Held(NamedTuple):
    """The experts of this rank: `local[e]` is expert e's index here, or -1; `experts[i]` is the expert at index i. Both int64."""

    local: torch.Tensor
    experts: torch.Tensor


def run_experts(
    form: ExpertForm,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    held: Held,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """This rank's partial sum `[T, H]`, in x's dtype. x `[T, H]`; experts `[T, k]` int64, any of the model's; weights `[T, k]`."""
    weights = weights.to(x.dtype)
    match form:
        case ExpertForm.NONE:
            return torch.zeros_like(x)
        case ExpertForm.DENSE:
            return _dense(x, experts, weights, held, gate_up, down)
        case ExpertForm.GATHERED:
            return _gathered(x, held.local[experts], weights, gate_up, down)
        case ExpertForm.LISTED:
            return _listed(x, held.local[experts], weights, gate_up, down)
        case ExpertForm.GROUPED:
            return _grouped(x, held.local[experts], weights, gate_up, down)


def _dense(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, held: Held, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    rows, top_k = experts.shape
    num_experts = held.local.shape[0]
    combine = x.new_zeros(rows, num_experts).scatter_(1, experts, weights).index_select(1, held.experts).unsqueeze(-1)
    gate, up = functional.linear(x, gate_up.flatten(0, 1)).view(rows, gate_up.shape[0], 2, -1).unbind(2)
    units = functional.silu(gate).mul_(up).mul_(combine)
    if top_k < num_experts:
        # What an expert makes of a row that did not choose it may overflow, and then zero times it is not zero.
        units = units.masked_fill_(combine == 0, 0)
    if down.mT.is_contiguous():
        return units.flatten(1) @ down.mT.reshape(-1, down.shape[1])
    return torch.bmm(units.transpose(0, 1), down.mT).sum(0)


def _gathered(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    rows, top_k = chosen.shape
    weights = weights.masked_fill(chosen < 0, 0)
    index = chosen.clamp(min=0).flatten()
    pairs = x.repeat_interleave(top_k, 0).unsqueeze(-1)
    units = _activate((gate_up.index_select(0, index) @ pairs).squeeze(-1))
    out = (down.index_select(0, index) @ units.unsqueeze(-1)).view(rows, top_k, -1)
    return (out * weights.unsqueeze(-1)).sum(1)


def _listed(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    partial = torch.zeros_like(x)
    for row, choices in enumerate(chosen.tolist()):
        for choice, expert in enumerate(choices):
            if expert >= 0:
                units = _activate(functional.linear(x[row], gate_up[expert])).mul_(weights[row, choice])
                partial[row] += functional.linear(units, down[expert])
    return partial


def _grouped(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    rows, top_k = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    foreign, *counts = torch.bincount(chosen.flatten() + 1, minlength=gate_up.shape[0] + 1).tolist()
    order = order[foreign:]
    mine = x.index_select(0, order // top_k)
    outputs = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            units = _activate(functional.linear(mine[start : start + count], gate_up[expert]))
            outputs.append(functional.linear(units, down[expert]))
            start += count
    # Each pair has a place of its own, summed in the order of choices: the same bits however the rows were grouped.
    pairs = x.new_zeros(rows * top_k, x.shape[1])
    if outputs:
        pairs.index_copy_(0, order, torch.cat(outputs).mul_(weights.flatten()[order].unsqueeze(-1)))
    return pairs.view(rows, top_k, -1).sum(1)


def _activate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)
