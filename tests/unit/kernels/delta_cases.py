"""A random Gated DeltaNet layer with its states, and its formulas row by row in float64."""

from __future__ import annotations

import torch


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


class DeltaCase:
    """Weights and pools; `run` is the specification of what the kernels do to one slot."""

    def __init__(
        self,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        taps: int,
        *,
        slots: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.taps = key_heads, value_heads, key_dim, value_dim, taps
        self.channels = 2 * key_heads * key_dim + value_heads * value_dim
        self.dtype, self.device = dtype, device
        self._generator = torch.Generator().manual_seed(self.channels + taps)
        self.weight = self.random(self.channels, taps)
        self.norm = self.random(value_dim)
        self.a_log = self.random(value_heads).float() * 0.5
        self.dt_bias = self.random(value_heads).float()
        self.conv = self.random(slots, self.channels, taps - 1)
        self.h = self.random(slots, value_heads, key_dim, value_dim).float()

    def random(self, *shape: int) -> torch.Tensor:
        """Normal values of this case's dtype on its device, drawn in order."""
        return torch.randn(shape, generator=self._generator).to(self.dtype).to(self.device)

    def projection(self, rows: int) -> torch.Tensor:
        """Rows of the fused projection, strided as those of a wider matrix."""
        width = self.channels + self.value_heads * self.value_dim + 2 * self.value_heads
        return self.random(rows, width + 8)[:, :width]

    def run(self, projected: torch.Tensor, slot: int, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of one slot's sequence -> outputs `[R, value width]`, and the two states after them, in float64 on the CPU."""
        width = self.value_heads * self.value_dim
        mixed, z, b, a = projected.cpu().double().split((self.channels, width, self.value_heads, self.value_heads), 1)
        window = torch.cat((self.conv[slot].cpu().double().t(), mixed))
        h = self.h[slot].cpu().double()
        repeats = self.value_heads // self.key_heads
        outputs = []
        for row in range(projected.shape[0]):
            convolved = silu((window[row : row + self.taps].t() * self.weight.cpu().double()).sum(1))
            q, k, v = convolved.split((self.key_heads * self.key_dim, self.key_heads * self.key_dim, width))
            q, k = (x.view(self.key_heads, self.key_dim) for x in (q, k))
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            q, k = q.repeat_interleave(repeats, 0) / self.key_dim**0.5, k.repeat_interleave(repeats, 0)
            v = v.view(self.value_heads, self.value_dim)
            g = -self.a_log.cpu().double().exp() * (1 + (a[row] + self.dt_bias.cpu().double()).exp()).log()
            beta = 1 / (1 + (-b[row]).exp())
            h = h * g.exp()[:, None, None]
            wrong = v - torch.einsum("hkv,hk->hv", h, k)
            h = h + torch.einsum("hk,hv->hkv", k, wrong * beta[:, None])
            o = torch.einsum("hkv,hk->hv", h, q)
            o = o / (o.square().mean(-1, keepdim=True) + eps).sqrt() * self.norm.cpu().double()
            outputs.append((o * silu(z[row].view(o.shape))).flatten())
        return torch.stack(outputs), window[window.shape[0] - self.taps + 1 :].t(), h
