"""Bank reads over ranks that each hold a share of the value table. The bits are those of one rank that holds all of it.

A read is a sum of int64 fixed-point numbers (`bank_shard_mode` "fixed"), but communicators sum float32. So each number travels as
four digits of 16 bits, the highest signed: their sums over up to 256 ranks are below 2^24, exact in float32 in any order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from model.trellis.bank import MemoryBank
from model.trellis.bank_shards import finish

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""The sum of all ranks' float32 tensors."""
MOST_RANKS = 256
DIGIT, DIGITS = 16, 4
READ_ROWS = 256
"""Rows that look slots up at once: a row's values and scores are many times its width."""


def read_bank(bank: MemoryBank, point: int, h: torch.Tensor, reduce: Reduce | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`h [T, d]` after the read, and the slots read `[T, heads * top_k]` int32. `reduce` is None where all rows are here."""
    parts, slots = [], []
    for rows in h.split(READ_ROWS):
        indices, weights = bank.select(point, rows.unsqueeze(0))
        parts.append(bank.part(indices, weights)[0])
        slots.append(indices[0].flatten(1))
    total = torch.cat(parts) if len(parts) > 1 else parts[0]
    if reduce is not None:
        total = from_digits(reduce(to_digits(total)))
    read = finish(bank.settings.bank_shard_mode, total, weights)
    return bank.add(point, h, read), torch.cat(slots).int()


def to_digits(numbers: torch.Tensor) -> torch.Tensor:
    """int64 `[T, n]` -> float32 `[T, 4 n]`: the digits from the lowest on, n of each."""
    mask = (1 << DIGIT) - 1
    low = [(numbers >> DIGIT * digit) & mask for digit in range(DIGITS - 1)]
    return torch.cat((*low, numbers >> DIGIT * (DIGITS - 1)), -1).float()


def from_digits(digits: torch.Tensor) -> torch.Tensor:
    """int64 `[T, n]` of sums of digits `[T, 4 n]`."""
    parts = digits.long().chunk(DIGITS, -1)
    total = parts[0]
    for digit, part in enumerate(parts[1:], start=1):
        total = total + (part << DIGIT * digit)
    return total
