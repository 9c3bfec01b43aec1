"""Random sequences in a paged cache, and softmax attention over them in float64."""

from __future__ import annotations

import torch

BLOCK = 16


class PagedCase:
    """Keys and values of several sequences, in float64 by position and in shuffled blocks of a cache full of noise."""

    def __init__(self, lengths: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
        self.lengths, self.dtype, self.device = lengths, dtype, device
        counts = [-(-length // BLOCK) for length in lengths]
        blocks = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        caches = torch.randn(2, len(blocks), BLOCK, kv_heads, head_dim, generator=generator).to(dtype)
        self.k_cache, self.v_cache = caches.to(device).unbind(0)
        tables = torch.zeros(len(lengths), max(max(counts), 1), dtype=torch.int32)
        self.keys, self.values = [], []
        for number, count in enumerate(counts):
            mine = torch.tensor([blocks.pop() for _ in range(count)], dtype=torch.int64)
            tables[number, :count] = mine.to(torch.int32)
            self.keys.append(caches[0][mine].flatten(0, 1)[: lengths[number]].double())
            self.values.append(caches[1][mine].flatten(0, 1)[: lengths[number]].double())
        self.tables = tables.to(device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)

    def random(self, *shape: int, seed: int = 1) -> torch.Tensor:
        """Normal values of this case's dtype on its device."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(self.dtype).to(self.device)

    def attend(self, number: int, q: torch.Tensor, window: int | None) -> torch.Tensor:
        """The last rows q `[R, heads, head_dim]` of one sequence -> `[R, heads * head_dim]` float64."""
        rows, heads, head_dim = q.shape
        keys, values = self.keys[number], self.values[number]
        length = keys.shape[0]
        group = heads // keys.shape[1]
        position = torch.arange(length - rows, length)[:, None]
        key = torch.arange(length)[None]
        seen = key <= position
        if window is not None:
            seen &= key > position - window
        scores = torch.einsum("rhd,khd->hrk", q.cpu().double(), keys.repeat_interleave(group, 1)) / head_dim**0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hrk,khd->rhd", weights, values.repeat_interleave(group, 1)).flatten(1)
