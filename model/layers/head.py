"""The output projection, divided over the vocabulary."""

from __future__ import annotations

import torch
from torch import nn

from model.base import Communicator
from model.config import ModelConfig
from model.formats import DenseFormat, WeightFormat
from model.layers.build import Build
from model.parallel import Parallel


class VocabHead(nn.Module):
    """This rank's shard of the output projection, padded with zero rows to the size of every rank's; `vocab` are those without."""

    def __init__(self, config: ModelConfig, parallel: Parallel, build: Build) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.vocab = parallel.vocab_rows(config.vocab_size)
        self.shard = parallel.vocab_shard(config.vocab_size)
        self.rank = parallel.rank
        self.weight: WeightFormat | None = None if config.tied else DenseFormat(build.weight(self.shard, config.hidden_size))

    def forward(self, rows: torch.Tensor, embedding: torch.Tensor, comm: Communicator) -> torch.Tensor | None:
        """`[W, hidden]` -> `[W, vocab]` float32 on rank 0, None elsewhere."""
        shards = comm.gather_to_head(self.project(rows, embedding))
        if shards is None:
            return None
        logits = shards[0] if len(shards) == 1 else torch.cat(shards, -1)
        return logits[:, : self.vocab_size].float()

    def project(self, rows: torch.Tensor, embedding: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`[W, hidden]` -> `[W, shard]`, in `out` if it is given. A tied head is this rank's rows of `embedding`."""
        if self.weight is None:
            weight = embedding.narrow(0, self.rank * self.shard, self.shard)
        elif out is None:
            return self.weight.linear(rows)
        else:
            weight = self.weight.dequantize()
        return torch.mm(rows, weight.t(), out=out)
