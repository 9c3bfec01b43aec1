"""Counter-based noise: an exponential variate that depends on (seed, generated index, token id) and on nothing else.

A row's 64-bit key is made on the host from seed and index; the hash of a key and a token runs in wrapping int32 operations, so
its bits are the same on every device and in every batch. Token choice is a race: the token with the smallest E / p wins, with E
exponential, which draws token i with probability p_i (the Gumbel-max trick, since -log E is Gumbel distributed).
"""

from __future__ import annotations

import numpy as np
import torch

_MASK64 = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# lowbias32's multipliers (Wellons' search for low-bias 32-bit mixers), as signed int32.
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B - (1 << 32)


def mix64(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele, Lea and Flood 2014): a bijection of 64-bit integers in which every bit reaches every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def row_keys(seeds: list[int], indices: list[int]) -> np.ndarray:
    """int32 [W, 2]: the key of each row's draw, as two signed 32-bit words, the lower one first. Seeds are taken modulo 2**64."""
    draws = mix64(np.array([seed & _MASK64 for seed in seeds], np.uint64) + _GOLDEN) + np.array(indices, np.uint64) * _GOLDEN
    return mix64(draws).astype("<u8").view("<i4").reshape(-1, 2)


def _xor_shift(value: torch.Tensor, by: int) -> torch.Tensor:
    """`value ^= value >>> by` in place; torch shifts int32 arithmetically, so the sign's copies are masked off."""
    return value.bitwise_xor_((value >> by).bitwise_and_((1 << (32 - by)) - 1))


def token_words(vocab_size: int, device: torch.device | str) -> torch.Tensor:
    """int32 [V]: the half of the hash that depends on the token id alone."""
    words = torch.arange(1, vocab_size + 1, dtype=torch.int32, device=device)
    _xor_shift(words, 16).mul_(_MULTIPLY_1)
    _xor_shift(words, 15).mul_(_MULTIPLY_2)
    return _xor_shift(words, 16)


def hash_bits(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """int32 [W, N], uniform in [0, 2**31): the hash of each key (int32 [W, 2]) with each token word (int32 [N] or [W, N])."""
    bits = words ^ keys[:, :1]
    _xor_shift(bits, 16).mul_(_MULTIPLY_1).add_(keys[:, 1:])
    _xor_shift(bits, 15).mul_(_MULTIPLY_2)
    return _xor_shift(bits, 16).bitwise_and_(0x7FFF_FFFF)


def log_exponential(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float32 [W, N]: log E of a standard exponential E for each key and token word; always finite.

    The uniform u lies in [2**-32, 1 - 2**-24] and keeps float32's resolution near 0, where small E decide, so E is -log(1 - u).
    Tokens whose probability is below about 1e-9 are drawn with a rounded one.
    """
    uniform = hash_bits(words, keys).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_()
