"""Everything that reads hidden states out: the tied embedding, exit scores, and the heads that only training has."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from model.trellis.config import AuxHeadSpec, TrellisConfig
from model.trellis.norm import row_score
from model.trellis.output import AuxiliaryOutputs
from model.trellis.projection import Projection


class TiedEmbeddingHead(nn.Module):
    """The one matrix `(vocab, d)`, used in both directions."""

    def __init__(self, config: TrellisConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.d_model))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the ids: `[B, n] -> [B, n, d]`."""
        return functional.embedding(token_ids, self.weight)

    def logits(self, z: torch.Tensor) -> torch.Tensor:
        """`z E^T`: `[..., d] -> [..., vocab]`."""
        return functional.linear(z, self.weight)


class ExitHead(nn.Module):
    """`row_score`: a weight `(d,)` and a bias `(1,)`."""

    def __init__(self, config: TrellisConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.d_model))
        self.bias = nn.Parameter(torch.empty(1))
        self.eps = config.eps

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """`[B, n, d] -> [B, n]`, at least float32."""
        return row_score(h, self.weight, self.bias, self.eps)


class ExitHeads(nn.ModuleDict):
    """One halting scorer per loop, under the loop's number. Its logits are reported and never acted on."""

    def __init__(self, config: TrellisConfig) -> None:
        super().__init__({str(j): ExitHead(config) for j in range(1, config.k_max + 1)})

    def score(self, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Hidden states after loops 1, 2, ... `[B, n, d]` -> `[loops, B, n]`."""
        return torch.stack([self[str(j)](h) for j, h in enumerate(hidden, start=1)])


class LabelHead(nn.Module):
    """`out(silu(hidden(z)))`"""

    def __init__(self, inputs: int, width: int, labels: int) -> None:
        super().__init__()
        self.hidden = Projection(inputs, width)
        self.out = Projection(width, labels)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """`[B, n, d] -> [B, n, labels]`"""
        return self.out(functional.silu(self.hidden(z)))


class PairHead(nn.Module):
    """Data flow from a definition to a use: `logits_e = sum_c pair[e, c] (D z_def)_c (U z_use)_c`."""

    def __init__(self, inputs: int, width: int, labels: int) -> None:
        super().__init__()
        self.def_proj = Projection(inputs, width)
        self.use_proj = Projection(inputs, width)
        self.pair = Projection(width, labels)

    def forward(self, z: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        """`z [B, n, d]` and positions (def, use) `[B, p, 2]` -> `[B, p, labels]`."""
        at = pairs.unsqueeze(-1).expand(-1, -1, -1, z.shape[-1])
        defs, uses = z.gather(1, at[:, :, 0]), z.gather(1, at[:, :, 1])
        return self.pair(self.def_proj(defs) * self.use_proj(uses))


class AuxiliaryHeads(nn.Module):
    """The four training-only heads. They read the final-normed output of the coda, and nothing reads them."""

    def __init__(self, config: TrellisConfig, spec: AuxHeadSpec) -> None:
        super().__init__()
        self.names = tuple(name for name, _ in spec.token_heads())
        for name, labels in spec.token_heads():
            # Not add_module: it refuses "type", the name of a method of every module.
            self._modules[name] = LabelHead(config.d_model, spec.width, labels)
        self.dfg = PairHead(config.d_model, spec.dfg_width, spec.dfg_labels)

    def forward(self, z: torch.Tensor, dfg_pairs: torch.Tensor | None) -> AuxiliaryOutputs:
        """Logits by head name; `dfg` only where pairs are given."""
        found = AuxiliaryOutputs()
        for name in self.names:
            head = self._modules[name]
            assert head is not None
            found[name] = head(z)
        if dfg_pairs is not None:
            found["dfg"] = self.dfg(z, dfg_pairs)
        return found
