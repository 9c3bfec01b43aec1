"""Judges greedily generated tokens by transformers, with the tie rule of the project.

A token differs from the reference only where the reference's own best two logits, computed in float64, are closer than 1e-4.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from tests.support.checkpoints import _reference

NEAR_TIE = 1e-4


@dataclass
class Judged:
    """Tokens compared so far, and how many of them differed at a near tie."""

    tokens: int = 0
    ties: int = 0


def judge_greedy(folder: Path, prompt: list[int], generated: list[int], judged: Judged) -> None:
    """Raise AssertionError unless each token is the argmax after what precedes it, near ties apart."""
    logits = _logits(_reference(folder), prompt + generated)[len(prompt) - 1 : -1]
    best = logits.argmax(-1)
    for place in (best != torch.tensor(generated)).nonzero().flatten().tolist():
        exact = _logits(_double(folder), prompt + generated[:place])[-1]
        top, second = exact.topk(2).values.tolist()
        chosen = exact[generated[place]].item()
        assert max(top - chosen, top - second) < NEAR_TIE, (
            f"token {place} after a prompt of {len(prompt)} is {generated[place]}, transformers' is {int(best[place])}: "
            f"{top - chosen:.2e} below the best logit"
        )
        judged.ties += 1
    judged.tokens += len(generated)


def _logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@cache
def _double(folder: Path) -> torch.nn.Module:
    return copy.deepcopy(_reference(folder)).double()
