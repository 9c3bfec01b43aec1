"""Expert-choice routing by capacity: at boundary j the ceil(rho_j n) best-scored tokens of a sequence run loop j."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from model.trellis.norm import row_score
from model.trellis.settings import RouterSettings


@dataclass(frozen=True, slots=True)
class RouterDecision:
    """One boundary: `mask [B, n]` bool, `count` per sequence, `scores [B, n]` of all tokens, `positions [B, count]` ascending."""

    mask: torch.Tensor
    count: int
    scores: torch.Tensor
    positions: torch.Tensor


class CapacityRouter(nn.Module):
    """The router of one boundary: scores are `row_score(h)`, ranked as they are, since a sigmoid would saturate into ties."""

    def __init__(self, width: int, rho: Fraction, settings: RouterSettings, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(1))
        self.rho = rho
        self.settings = settings
        self.eps = eps

    def count(self, tokens: int) -> int:
        """`ceil(rho tokens)`, exactly."""
        return -(-self.rho.numerator * tokens // self.rho.denominator)

    def scores(self, h: torch.Tensor) -> torch.Tensor:
        """`[B, n, d] -> [B, n]`, at least float32."""
        return row_score(h, self.weight, self.bias, self.eps)

    def forward(self, h: torch.Tensor, previous: torch.Tensor | None) -> RouterDecision:
        """Decide for `h [B, n, d]`; `previous [B, e]` are the positions the boundary before chose, None for all."""
        return self.decide(self.scores(h), previous)

    def decide(self, scores: torch.Tensor, previous: torch.Tensor | None) -> RouterDecision:
        """The decision that follows from `scores [B, n]`."""
        count = self.count(scores.shape[1])
        index = select(scores.detach(), previous if self.settings.nested else None, count)
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter(1, index, True)
        return RouterDecision(mask, count, scores, index)


def select(scores: torch.Tensor, eligible: torch.Tensor | None, count: int) -> torch.Tensor:
    """`[B, count]` positions, ascending: the best of `eligible [B, e]` (ascending; None: all) by score, equal ones by position.

    NaN ranks with minus infinity. Only the eligible are sorted: masking the others would tie them with a score of minus infinity.
    """
    ranked = torch.where(scores.isnan(), -torch.inf, scores)
    if eligible is not None:
        ranked = ranked.gather(1, eligible)
    order = ranked.sort(dim=1, descending=True, stable=True).indices[:, :count]
    chosen = order if eligible is None else eligible.gather(1, order)
    return chosen.sort(dim=1).values


def credit(ran: torch.Tensor, before: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """`ran`, bit for bit, with a gradient for the scores of its rows: `sigmoid'(score) <grad, ran - before>`.

    That is the gradient of `before + sigmoid(score) (ran - before)` at an output that unrolled equivalence forbids to scale.
    ran and before `[B, m, d]`, scores `[B, m]`.
    """
    return _Credit.apply(ran, before, scores)


class _Credit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ran: torch.Tensor, before: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ran, before, scores)
        return ran.view_as(ran)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        (grad,) = grads
        ran, before, scores = ctx.saved_tensors
        chance = scores.sigmoid()
        gain = (grad.to(scores.dtype) * (ran - before).to(scores.dtype)).sum(-1)
        return grad, None, chance * (1 - chance) * gain
