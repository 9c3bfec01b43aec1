"""Random decode steps of attention layers, and what they must give in float64."""

from __future__ import annotations

import torch

from tests.unit.kernels.attention_cases import BLOCK, PagedCase

EPS = 1e-3


def turned(x: torch.Tensor, weight: torch.Tensor | None, angles: torch.Tensor, *, zero_centered: bool) -> torch.Tensor:
    """Norm and half-split rotation of `[T, heads, head_dim]` in float64."""
    x = x.double()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight.double() + (1.0 if zero_centered else 0.0))
    half = angles.shape[1]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


class StepCase:
    """One row of each of some sequences; the rows `cached` find their keys and values in the cache and write none."""

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        half: int,
        dtype: torch.dtype,
        *,
        cached: tuple[int, ...] = (),
        norm: str | None = "plain",
        gated: bool = False,
        window: int | None = None,
        device: str = "cpu",
    ) -> None:
        self.paged = PagedCase(lengths, kv_heads, head_dim, dtype, device)
        self.heads, self.kv_heads, self.gated, self.window = heads, kv_heads, gated, window
        self.zero_centered = norm == "zero-centred"
        rows, self.width = len(lengths), heads * head_dim
        self.projected = self.paged.random(rows, self.width * (2 if gated else 1) + 2 * kv_heads * head_dim + 8)
        self.q_norm, self.k_norm = (None if norm is None else self.paged.random(head_dim, seed=seed) for seed in (2, 3))
        self.angles = torch.randn(rows, half, generator=torch.Generator().manual_seed(rows)).double()
        ends = [(row, length - 1) for row, length in enumerate(lengths) if length and row not in cached]
        self.places = torch.full((rows,), -1, dtype=torch.int64)
        for row, end in ends:
            self.places[row] = int(self.paged.tables[row, end // BLOCK]) * BLOCK + end % BLOCK

    def arguments(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> dict[str, object]:
        """What `attention_step` takes, but turns and configuration."""
        device = self.paged.device
        return {
            "projected": self.projected,
            "cos": self.angles.cos().float().to(device),
            "sin": self.angles.sin().float().to(device),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "places": self.places.to(device),
            "block_tables": self.paged.tables,
            "seq_lens": self.paged.seq_lens,
            "heads": self.heads,
            "max_seq": max(self.paged.lengths),
            "q_norm": self.q_norm,
            "k_norm": self.k_norm,
            "eps": EPS,
            "zero_centered": self.zero_centered,
            "gated": self.gated,
            "window": self.window,
        }

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs and both caches afterwards, float64 on the CPU."""
        projected = self.projected.cpu().double()
        head_dim = self.paged.k_cache.shape[-1]
        heads = projected[:, : self.width + 2 * self.kv_heads * head_dim].unflatten(1, (-1, head_dim))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 1)
        norms = [None if weight is None else weight.cpu() for weight in (self.q_norm, self.k_norm)]
        q, k = (turned(x, norm, self.angles, zero_centered=self.zero_centered) for x, norm in zip((q, k), norms, strict=True))
        k_cache, v_cache = (cache.cpu().double().flatten(0, 1) for cache in (self.paged.k_cache, self.paged.v_cache))
        out = torch.zeros(q.shape[0], self.width, dtype=torch.float64)
        for row, length in enumerate(self.paged.lengths):
            place = int(self.places[row])
            if place >= 0:
                k_cache[place], v_cache[place] = k[row], v[row]
                self.paged.keys[row][-1], self.paged.values[row][-1] = k[row], v[row]
            if length:
                out[row] = self.paged.attend(row, q[row : row + 1], self.window)[0]
        if self.gated:
            out *= projected[:, self.width + 2 * self.kv_heads * head_dim :][:, : self.width].sigmoid()
        shape = self.paged.k_cache.shape
        return out, k_cache.view(shape), v_cache.view(shape)
