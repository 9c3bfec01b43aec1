"""One layer, whatever its mixer: `h + mixer(norm1 h)`, then `h + down(silu(gate x) * up x)` with `x = norm2 h`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from model.trellis.attention import GlobalAttention, Place, SlidingAttention
from model.trellis.config import GDN, GLOBAL, TrellisConfig
from model.trellis.delta import GatedDelta, GdnState
from model.trellis.norm import Gain
from model.trellis.projection import Projection, Tuning
from model.trellis.state import GlobalKV
from model.trellis.window import Window


class SwiGlu(nn.Module):
    """`down(silu(gate x) * up x)`"""

    def __init__(self, config: TrellisConfig) -> None:
        super().__init__()
        self.gate_proj = Projection(config.d_model, config.mlp_dim)
        self.up_proj = Projection(config.d_model, config.mlp_dim)
        self.down_proj = Projection(config.mlp_dim, config.d_model)

    def forward(self, x: torch.Tensor, tuning: Tuning) -> torch.Tensor:
        """`[..., d] -> [..., d]`"""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x, tuning.up), tuning.down)


class Block(nn.Module):
    """A layer of the kind `kind`; the method to call is that of its kind. None changes what it is given, global caches apart."""

    def __init__(self, config: TrellisConfig, kind: str) -> None:
        super().__init__()
        self.kind = kind
        mixers = {GDN: GatedDelta, GLOBAL: GlobalAttention}
        self.mixer = mixers.get(kind, SlidingAttention)(config)
        self.mlp = SwiGlu(config)
        self.norm1 = Gain(config.d_model, eps=config.eps)
        self.norm2 = Gain(config.d_model, eps=config.eps)

    def run_gdn(self, h: torch.Tensor, tuning: Tuning, state: GdnState) -> tuple[torch.Tensor, GdnState]:
        """`[B, m, d]` and the state after."""
        mixed, state = self.mixer(self.norm1(h, tuning.gain1), tuning, state)
        return self.finish(h + mixed, tuning), state

    def run_sliding(self, h: torch.Tensor, tuning: Tuning, window: Window, place: Place) -> tuple[torch.Tensor, Window]:
        """`[B, m, d]` and the window after."""
        mixed, window = self.mixer(self.norm1(h, tuning.gain1), tuning, window, place)
        return self.finish(h + mixed, tuning), window

    def run_global(
        self, h: torch.Tensor, tuning: Tuning, cache: GlobalKV | None, place: Place, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`[B, n, d]`; writes into the cache."""
        return self.finish(h + self.mixer(self.norm1(h, tuning.gain1), tuning, cache, place, bias), tuning)

    def finish(self, h: torch.Tensor, tuning: Tuning) -> torch.Tensor:
        """The MLP's half, from `h + mixed` on: `[..., d] -> [..., d]`."""
        return h + self.mlp(self.norm2(h, tuning.gain2), tuning)
