"""A bit-exact checksum of tensors, summed on their device.

Every element counts as an integer, times an odd weight of its place, modulo 2^64. Integer sums are the same in any order, so equal
bits give equal sums on any device, and an odd weight keeps a change of one element from vanishing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9
_CHUNK = 1 << 22
_U64 = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int64 with the bits of a u64."""
    return value - (1 << 64) if value >> 63 else value


def _weights(start: int, count: int, device: torch.device) -> torch.Tensor:
    """int64 `[count]`: odd, well spread weights of places `start ..`."""
    place = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)
    return ((place ^ (place >> 31)) * _signed(_MIX)) | 1


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """int64 scalar on the tensor's device: the checksum of a tensor `[rows, ...]`, at most a few MiB of scratch at a time."""
    rows = tensor.shape[0]
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).reshape(rows, -1)
    inner = _weights(0, bits.shape[1], tensor.device)
    step = max(1, _CHUNK // bits.shape[1])
    parts = []
    for start in range(0, rows, step):
        chunk = bits[start : start + step].to(torch.int64)
        # Rows take places after the columns', lest a matrix and its transpose have one sum.
        outer = _weights(bits.shape[1] + start, chunk.shape[0], tensor.device)
        parts.append(((chunk * inner).sum(1) * outer).sum())
    return torch.stack(parts).sum()


def combine(sums: Sequence[torch.Tensor]) -> int:
    """One u64 of many checksums, in their order; a single transfer to the host."""
    return mix(torch.stack(list(sums)).tolist()) if sums else 0


def combine_each(groups: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, int]:
    """One u64 a group of checksums; a single transfer to the host for all of them."""
    sums = [value for group in groups.values() for value in group]
    values = iter(torch.stack(sums).tolist() if sums else [])
    return {name: mix([next(values) for _ in group]) for name, group in groups.items()}


def mix(values: Iterable[int]) -> int:
    """One u64 of 64-bit integers, in their order; 0 of none."""
    digest = 0
    for value in values:
        digest = ((digest ^ (value & _U64)) * _GOLDEN + _MIX) & _U64
        digest ^= digest >> 29
    return digest
