"""State dictionaries with and without the heads that only training has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

AUX_PREFIX = "aux_heads."


class Surplus(NamedTuple):
    """What loading found: torch's result, and the keys of auxiliary heads that the model does not have, sorted."""

    load_result: Any
    surplus_keys: tuple[str, ...]


def split_aux(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """A new dictionary without auxiliary heads, and the keys left out, sorted."""
    left = {key: tensor for key, tensor in tensors.items() if not key.startswith(AUX_PREFIX)}
    return left, tuple(sorted(tensors.keys() - left.keys()))


def load_without_aux(model: nn.Module, tensors: dict[str, torch.Tensor], *, strict: bool) -> Surplus:
    """Load; auxiliary heads that the model lacks are surplus, and its own that `tensors` lacks keep their values.

    Any other missing or unexpected key raises RuntimeError under `strict` and is listed in the result otherwise.
    """
    own = {key: tensor for key, tensor in model.state_dict().items() if key.startswith(AUX_PREFIX)}
    surplus = tuple(sorted(key for key in tensors if key.startswith(AUX_PREFIX) and key not in own))
    offered = own | {key: tensor for key, tensor in tensors.items() if key not in surplus}
    return Surplus(model.load_state_dict(offered, strict=strict), surplus)
