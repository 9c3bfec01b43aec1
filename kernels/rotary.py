"""Rotary position embedding (arXiv 2104.09864), in the half-split form: element i turns with element i + rotary_dim / 2."""

from __future__ import annotations

import torch


def rotary_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines `[T, 1, rotary_dim]` for positions `[T]` (or `[T, rotary_dim / 2]`, one for each frequency).

    Angles are float32 products. The sines of the first half are negative, so that applying them needs no rotation of signs.
    """
    angles = positions.float().reshape(positions.shape[0], -1) * inv_freq
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1).unsqueeze_(1).to(dtype), torch.cat((-sin, sin), -1).unsqueeze_(1).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first `rotary_dim` elements of every head of x `[T, heads, head_dim]`.

    May write into x, whose storage the caller gives up. `cos` and `sin` are those of `rotary_tables`.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(rotary_dim // 2, -1), sin)
    turned = x[..., :rotary_dim]
    turned.copy_(torch.addcmul(turned * cos, turned.roll(rotary_dim // 2, -1), sin))
    return x
