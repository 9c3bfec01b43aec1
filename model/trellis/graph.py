"""The modules of a Trellis model and what they are called: one set, of which the library and the server each have a pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from model.config import RopeConfig, RopeKind
from model.layers.rotary import Rotary
from model.trellis.bank import MemoryBank, Shard
from model.trellis.block import Block
from model.trellis.config import TrellisConfig
from model.trellis.engine import LoopEngine
from model.trellis.heads import ExitHeads, TiedEmbeddingHead
from model.trellis.norm import Gain
from model.trellis.settings import ModelSettings
from model.trellis.specialisation import PerLoopSpecialisation


class Part(nn.Module):
    """Layers in order, under the name `layers`."""

    def __init__(self, config: TrellisConfig, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(config, kind) for kind in kinds])

    def blocks(self) -> Iterator[Block]:
        """The layers, in order."""
        for layer in self.layers:
            assert isinstance(layer, Block)
            yield layer


class Graph(nn.Module):
    """Every module of a model but the auxiliary heads; parameters without values. `shard` says which rows of the bank are here."""

    def __init__(self, config: TrellisConfig, settings: ModelSettings, shard: Shard) -> None:
        super().__init__()
        settings.check(config)
        self.config = config
        self.settings = settings
        self.embedding = TiedEmbeddingHead(config)
        self.prelude = Part(config, config.prelude)
        self.core = Part(config, config.core)
        self.coda = Part(config, config.coda)
        self.specialisation = PerLoopSpecialisation(config, enabled=self.settings.specialisation_enabled)
        self.engine = LoopEngine(config, self.settings, self.core.layers, self.specialisation)
        self.exit_heads = ExitHeads(config)
        self.final_norm = Gain(config.d_model, eps=config.eps)
        self.bank = MemoryBank(config, self.settings, shard)
        with torch.device("cpu"):  # constants, which have values even where parameters have none
            self._rotary = Rotary(RopeConfig(kind=RopeKind.DEFAULT, rotary_dim=config.head_dim, theta=config.rope_theta))

    def apply_readout(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., d] -> [..., vocab]`: the final norm and the tied matrix."""
        return self.embedding.logits(self.final_norm(hidden))
