"""What makes one core block four different loops: norm gains of every loop, adapters of loops 2 and later, and the switch."""

from __future__ import annotations

import torch
from torch import nn

from model.trellis.config import GDN, TrellisConfig
from model.trellis.projection import NEUTRAL, Lora, Tuning


class PerLoopSpecialisation(nn.Module):
    """Gains `(2, d)` per loop and core layer, and adapters at q, up and down from loop 2 on; loop 1 has the base weights.

    Adapters change what is read and transformed, never what is written into a state, so all loops share one basis there.
    With `enabled` False every loop is the base block: factors one, no adapters.
    """

    def __init__(self, config: TrellisConfig, *, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled
        loops = range(1, config.k_max + 1)
        self.gains = nn.ModuleDict({str(j): nn.ParameterList([torch.empty(2, config.d_model) for _ in config.core]) for j in loops})
        self.adapters = nn.ModuleDict(
            {str(j): nn.ModuleList([Adapters(config, kind) for kind in config.core]) for j in loops if j > 1}
        )

    def tuning(self, loop: int, layer: int) -> Tuning:
        """What loop `loop` (from 1) changes in core layer `layer` (from 0)."""
        if not self.enabled:
            return NEUTRAL
        gains = self.gains[str(loop)]
        assert isinstance(gains, nn.ParameterList)
        gain1, gain2 = gains[layer].unbind(0)
        if loop == 1:
            return Tuning(gain1, gain2)
        adapters = self.adapters[str(loop)]
        assert isinstance(adapters, nn.ModuleList)
        own = adapters[layer]
        assert isinstance(own, Adapters)
        return Tuning(gain1, gain2, own.q, own.up, own.down)


class Adapters(nn.Module):
    """The adapters of one layer in one loop."""

    def __init__(self, config: TrellisConfig, kind: str) -> None:
        super().__init__()
        queries = config.gdn_heads * config.gdn_key_dim if kind == GDN else config.heads * config.head_dim
        self.q = Lora(config.d_model, queries, config.lora_rank)
        self.up = Lora(config.d_model, config.mlp_dim, config.lora_rank)
        self.down = Lora(config.mlp_dim, config.d_model, config.lora_rank)
