"""Depthwise causal convolution over the last `kernel` tokens, with SiLU, and the inputs it carries from piece to piece."""

from __future__ import annotations

import torch
from torch.nn import functional


def conv_step(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of S sequences: outputs `[S, C]` and the new states.

    x `[S, C]`, state `[S, C, kernel - 1]` (the inputs before, oldest first), weight `[C, kernel]`, all of one dtype.
    """
    window = torch.cat((state, x.unsqueeze(-1)), -1)
    return functional.silu((window * weight).sum(-1)), window[..., 1:]


def conv_piece(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """T tokens of one sequence: outputs `[T, C]` and the new state. x `[T, C]`, state `[C, kernel - 1]`, weight `[C, kernel]`."""
    carried = weight.shape[1] - 1
    window = torch.cat((state, x.t()), -1)
    out = functional.conv1d(window.unsqueeze(0), weight.unsqueeze(1), groups=weight.shape[0])
    return functional.silu(out[0].t()), window[:, window.shape[1] - carried :]
