"""Changes of logits that name tokens, in place on [W, V] float32: logit_bias, forbidden stop tokens, a grammar's bitmask."""

from __future__ import annotations

import numpy as np
import torch

WORD_BITS = 32


def add_bias(logits: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """Add `values` [N] float32 at `places` [N] int64, flat indices row * V + token, none twice."""
    logits.view(-1).index_add_(0, places, values)


def forbid(logits: torch.Tensor, places: torch.Tensor) -> None:
    """-inf at `places` [N] int64, flat indices row * V + token."""
    logits.view(-1).index_fill_(0, places, -torch.inf)


def mask_words(mask: bytes, vocab_size: int) -> np.ndarray:
    """int32 [ceil(V / 32)]: a grammar's bitmask (little-endian uint32 words, bit t % 32 of word t // 32 allows token t).

    A mask made for fewer tokens than the model has logits forbids the others; surplus words are dropped. ValueError for a ragged
    length.
    """
    if len(mask) % 4:
        raise ValueError(f"a grammar mask of {len(mask)} bytes is not whole uint32 words")
    words = np.zeros(-(-vocab_size // WORD_BITS), np.int32)
    given = np.frombuffer(mask, "<i4")[: len(words)]
    words[: len(given)] = given
    return words


def apply_mask(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """-inf where row `rows[i]`'s bit is unset in `words[i]`; rows [M] int64, words [M, ceil(V / 32)] int32."""
    bits = (words.unsqueeze(2) >> torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)).bitwise_and_(1)
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(~allowed, -torch.inf))
