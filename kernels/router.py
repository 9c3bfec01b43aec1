"""Expert choice: softmax over the router's logits and the k largest of each row."""

from __future__ import annotations

import torch


def route(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights `[T, k]` float32 and experts `[T, k]` int64, largest first, of logits `[T, experts]`; softmax in float32.

    Normalised weights sum to 1: that is the softmax of the chosen logits alone.
    """
    logits = logits.float()
    if normalise:
        chosen, experts = logits.topk(top_k, dim=-1)
        return chosen.softmax(-1), experts
    weights, experts = logits.softmax(-1).topk(top_k, dim=-1)
    return weights, experts
