"""Which tokens may be drawn: min_p, then top_k, then top_p, each on what the one before left.

Inputs are scaled logits [W, N] float32 whose row maximum is 0. Equal logits are ranked by token id, lowest first, so the kept set
is the same on every device: exactly the k best, and the shortest prefix of the ranking whose probability reaches p.
"""

from __future__ import annotations

import torch

_USUAL_NUCLEUS = 1024
_CLEAR_OF_ROUNDING = 1.0001


def drop_below_min_p(scaled: torch.Tensor, log_min_p: torch.Tensor) -> None:
    """-inf, in place, where a token's probability is below min_p times the best one's; `log_min_p` [W, 1], -inf for off."""
    scaled.masked_fill_(scaled < log_min_p, -torch.inf)


def rank_and_cut(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, dropped_mass: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ranked logits [W, N], -inf where cut; their columns in `scaled` [W, N] int64).

    top_k [W, 1] int64 (N or more is off), top_p [W, 1] float64 (inf is off). `dropped_mass` is the sum of exp over tokens that
    count towards top_p's total but are known to be cut and left out of `scaled`.
    """
    ranked, columns = torch.sort(scaled, dim=1, descending=True, stable=True)
    place = torch.arange(ranked.shape[1], device=ranked.device)
    ranked.masked_fill_(place >= top_k, -torch.inf)
    # float64, so that the order of summation cannot move the boundary between batches or devices.
    mass = ranked.exp().double()
    total = mass.sum(dim=1, keepdim=True) + dropped_mass
    mass_before = mass.cumsum(dim=1) - mass
    ranked.masked_fill_(mass_before >= top_p * total, -torch.inf)
    return ranked, columns


def candidates(scaled: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, float]:
    """(ids [N] int64 of one row's possible survivors, in ascending order; the exp-sum of those left out that counts for top_p).

    `scaled` is [1, V] on the CPU: the number of survivors is needed on the host. Sorting all of a large vocabulary costs ten times
    more than all else, and few tokens can survive.
    """
    vocab = scaled.shape[1]
    if top_k < vocab:
        floor = scaled.topk(top_k, dim=1).values[:, -1:]
        keep = (scaled >= floor) & (scaled > -torch.inf)
        return keep[0].nonzero()[:, 0], 0.0
    if top_p >= 1.0:
        return (scaled[0] > -torch.inf).nonzero()[:, 0], 0.0
    mass = scaled.exp()[0]
    total = float(mass.sum(dtype=torch.float64))
    best = mass.topk(min(_USUAL_NUCLEUS, vocab)).values
    if float(best.sum(dtype=torch.float64)) > top_p * total * _CLEAR_OF_ROUNDING:
        least = float(best[-1])
    else:
        # Tokens under (1 - p) / V in probability sum to less than 1 - p, so the nucleus lies among the others.
        least = (1.0 - top_p) * total / vocab / _CLEAR_OF_ROUNDING
    ids = ((mass >= least) & (mass > 0.0)).nonzero()[:, 0]
    return ids, total - float(mass[ids].sum(dtype=torch.float64))
