"""Rotary frequencies of every supported kind, and the tables of a batch.

The formulas of the stretched kinds are those that checkpoints of the Hugging Face format name in `rope_type`: linear (position
interpolation, arXiv 2306.15595), yarn (arXiv 2309.00071), llama3 (the Llama 3.1 model card). "dynamic" stretches only sequences
longer than the positions of pre-training, which are not served, so its frequencies are the default ones.
"""

from __future__ import annotations

import math

import torch

from kernels.rotary import rotary_tables
from model.config import RopeConfig, RopeKind


class Rotary:
    """Cosines and sines for a batch's positions. Not a module: the frequencies are no weights, and follow the batch's device."""

    def __init__(self, config: RopeConfig) -> None:
        self._scale = config.attention_factor
        self._inv_freq = inverse_frequencies(config)
        self._parts = part_of_frequency(config)

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`[T, 1, rotary_dim]` cosines and signed sines, for positions `[T]`, or `[3, T]` (temporal, height, width)."""
        inv_freq, scale, parts = self.frequencies(positions.device)
        if positions.dim() == 2:
            positions = positions.index_select(0, parts).t()
        return rotary_tables(positions, inv_freq, scale, dtype)

    def frequencies(self, device: torch.device) -> tuple[torch.Tensor, float, torch.Tensor]:
        """Radians per position `[rotary_dim / 2]`, the tables' factor, and the part of a position that each frequency follows."""
        if self._inv_freq.device != device:
            self._inv_freq, self._parts = self._inv_freq.to(device), self._parts.to(device)
        return self._inv_freq, self._scale, self._parts


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """`[rotary_dim / 2]` float32: radians per position."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    plain = 1.0 / (config.theta**exponents)
    match config.kind:
        case RopeKind.LINEAR:
            return plain / config.factor
        case RopeKind.YARN:
            return _yarn(plain, config)
        case RopeKind.LLAMA3:
            return _llama3(plain, config)
        case RopeKind.DEFAULT | RopeKind.DYNAMIC:
            return plain


def part_of_frequency(config: RopeConfig) -> torch.Tensor:
    """`[rotary_dim / 2]` int64: which part of a three-part position each frequency follows, interleaved t h w t h w ... then t."""
    parts = torch.zeros(config.rotary_dim // 2, dtype=torch.int64)
    for part, count in enumerate(config.sections):
        if part:
            parts[part : 3 * count : 3] = part
    return parts


def _yarn(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Fast frequencies stay, slow ones are divided by the factor, with a linear ramp over the dimensions between."""

    def dimension(turns: float) -> float:
        ratio = config.original_positions / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001
    slow = ((torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / config.factor * slow + plain * (1 - slow)


def _llama3(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Wavelengths above the low-frequency bound are divided by the factor, those below the high one stay, others blend."""
    turns = config.original_positions * plain / (2 * math.pi)
    keep = ((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)).clamp(0, 1)
    return plain / config.factor * (1 - keep) + plain * keep
