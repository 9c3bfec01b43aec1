"""Initial values: normal, zero or one, each tensor from a generator of its own, made from the seed and its key.

So leaving out the auxiliary heads or the bank changes no other tensor, and every device and dtype starts from the same numbers.
"""

from __future__ import annotations

import math
import re
from hashlib import blake2b

import torch
from torch import nn

from model.trellis.bank import Shard
from model.trellis.bank_shards import shard_rows
from model.trellis.config import TrellisConfig

_ONES = re.compile(r".*\.gain|specialisation\.gains\..*")
_ZEROS = re.compile(r".*\.bias|.*\.w_g|specialisation\.adapters\..*\.B")
_WRITERS = re.compile(r".*\.mixer\.o_proj\.weight|.*\.mlp\.down_proj\.weight|bank\.points\.\d+\.o_proj\.weight")
_CONV = re.compile(r".*_conv\.weight")


@torch.no_grad()
def initialise(model: nn.Module, config: TrellisConfig, seed: int, shard: Shard) -> None:
    """Fill every parameter; of the value table, the rows of this shard.

    Matrices that write into the residual are scaled by the number of writes of the deepest path.
    """
    for key, parameter in model.named_parameters():
        if starts_as_one(key):
            parameter.fill_(1.0)
        elif _ZEROS.fullmatch(key):
            parameter.zero_()
        else:
            generator = torch.Generator("cpu").manual_seed(_seed_of(key, seed))
            whole = (config.bank_slots, config.bank_value_dim) if key == "bank.values" else parameter.shape
            drawn = torch.empty(whole, device="cpu").normal_(0.0, deviation(key, config), generator=generator)
            parameter.copy_(shard_rows(drawn, shard.rank, shard.world) if key == "bank.values" else drawn)


def starts_as_one(key: str) -> bool:
    """Whether a tensor is a gain, which starts as ones."""
    return _ONES.fullmatch(key) is not None


def deviation(key: str, config: TrellisConfig) -> float:
    """Standard deviation of a tensor that starts neither as ones nor as zeros."""
    if _WRITERS.fullmatch(key):
        depth = len(config.prelude) + len(config.coda) + config.k_max * len(config.core)
        return 0.02 / math.sqrt(2 * depth)
    if _CONV.fullmatch(key):
        return 0.5
    return {"bank.values": 1 / 16, "bank.sub_keys": 1.0}.get(key, 0.02)


def _seed_of(key: str, seed: int) -> int:
    return int.from_bytes(blake2b(f"{seed}/{key}".encode(), digest_size=8).digest(), "little", signed=True)
