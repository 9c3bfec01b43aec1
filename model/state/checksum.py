"""A bit-exact checksum of tensors, summed on their device.

Every 32-bit word counts as an integer, times an odd weight of its place in its row and one of its row, modulo 2^64: see
`kernels.checksum`. Rows whose bytes are not whole words count by elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from kernels.checksum import GOLDEN, MIX, place_weights, row_sums

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_WORD = 4
_U64 = (1 << 64) - 1


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """int64 scalar on the tensor's device: the checksum of a tensor `[rows, ...]`."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    words = _words(tensor)
    sums = _row_sums(words, torch.arange(words.shape[0], device=tensor.device))
    # Rows take places after the columns', lest a matrix and its transpose have one sum.
    return (sums * place_weights(words.shape[1], len(sums), tensor.device)).sum()


def checksum_rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """int64 `[n]`: a checksum for each of `rows` [n] int64 of a tensor `[rows, ...]`, whatever their numbers."""
    return _row_sums(_words(tensor), rows)


def device_index(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 `[n]` on the device; the host does not wait for it."""
    index = torch.tensor(list(values), dtype=torch.int64)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and values else index.to(device)


def combine(sums: Sequence[torch.Tensor]) -> int:
    """One u64 of many checksums, in their order; a single transfer to the host."""
    return mix(torch.stack(list(sums)).tolist()) if sums else 0


def mix(values: Iterable[int]) -> int:
    """One u64 of 64-bit integers, in their order; 0 of none."""
    digest = 0
    for value in values:
        digest = ((digest ^ (value & _U64)) * (GOLDEN & _U64) + (MIX & _U64)) & _U64
        digest ^= digest >> 29
    return digest


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of `[rows, ...]` as integers `[rows, n]`."""
    rows = tensor.shape[0]
    row_bytes = tensor.nbytes // max(1, rows)
    size = tensor.element_size() if row_bytes % _WORD else _WORD
    flat = tensor.contiguous().view(-1)
    if flat.storage_offset() * tensor.element_size() % size:
        flat = flat.clone()
    return flat.view(_INTEGERS[size]).view(rows, row_bytes // size)


def _row_sums(words: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if not words.is_cuda:
        return row_sums(words, rows)
    from kernels.checksum_triton import row_sums as row_sums_triton

    return row_sums_triton(words, rows)
