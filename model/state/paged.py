"""The paged key/value caches: one pool of blocks, the same block numbers in every layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from model.spec import CacheSpec
from model.state.checksum import checksum


class PagedPool:
    """Two tensors `[num_blocks, block_size, kv_heads, head_dim]` a layer. Who owns which block is the head's business.

    Blocks start as zeros: masked positions are multiplied by a weight of zero, which a stray NaN would survive.
    """

    def __init__(
        self, caches: Sequence[CacheSpec], *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._dtype = dtype
        self._device = device
        self._shapes = {cache.layer: (num_blocks, block_size, cache.kv_heads, cache.head_dim) for cache in caches}
        if len(self._shapes) != len(caches):
            raise ValueError("two caches name the same layer")
        self._kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, shape in self._shapes.items():
            self._kv[layer] = (zeros(shape, dtype, device), zeros(shape, dtype, device))

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(tensor.nbytes for pair in self._kv.values() for tensor in pair)

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one attention layer."""
        return self._kv[layer]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to) in every layer. All sources are read before any target is written."""
        if not pairs:
            return
        sources, targets = zip(*pairs, strict=True)
        bad = [block for block in (*sources, *targets) if not 0 <= block < self.num_blocks]
        if bad or len(set(targets)) != len(targets):
            raise ValueError(f"block pairs {list(pairs)} name a block twice as target or out of range 0..{self.num_blocks - 1}")
        source = torch.tensor(sources, dtype=torch.int64, device=self._device)
        target = torch.tensor(targets, dtype=torch.int64, device=self._device)
        for pair in self._kv.values():
            for tensor in pair:
                tensor.index_copy_(0, target, tensor.index_select(0, source))

    def zero(self, block: int) -> None:
        """As at the start, in every layer."""
        for pair in self._kv.values():
            for tensor in pair:
                tensor[block].zero_()

    def checksums(self, length: int, blocks: Sequence[int]) -> list[torch.Tensor]:
        """One int64 scalar a tensor, over the first `length` positions of a sequence that lies in `blocks`."""
        used = -(-length // self.block_size)
        if used > len(blocks):
            raise ValueError(f"{length} positions do not lie in {len(blocks)} blocks of {self.block_size}")
        index = torch.tensor(list(blocks[:used]), dtype=torch.int64, device=self._device)
        return [checksum(tensor.index_select(0, index).flatten(0, 1)[:length]) for pair in self._kv.values() for tensor in pair]

    def check_integrity(self) -> None:
        """Raise RuntimeError when a tensor is not of its declared shape, dtype and device."""
        if self._kv.keys() != self._shapes.keys():
            raise RuntimeError(f"the paged pool holds layers {sorted(self._kv)}, not {sorted(self._shapes)}")
        for layer, pair in self._kv.items():
            for name, tensor in zip(("keys", "values"), pair, strict=True):
                check_tensor(f"{name} of layer {layer}", tensor, self._shapes[layer], self._dtype, self._device)

    def close(self) -> None:
        """Drop the tensors, newest first."""
        while self._kv:
            self._kv.popitem()


def check_tensor(what: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise RuntimeError, naming `what`, when a tensor is not as declared."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device:
        raise RuntimeError(f"{what}: {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, declared {shape} {dtype} on {device}")


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. Host pages come from the system as zeros when they are first touched, so a large cache costs no start-up."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)
