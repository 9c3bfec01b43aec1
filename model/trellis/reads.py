"""What a decode step of one loop reads of a rank's weights."""

from __future__ import annotations

import re
from math import prod

from model.reads import WeightBytes
from model.state.sizes import DTYPE_BYTES
from model.trellis.config import BANK_READ_POINTS, GDN, TrellisConfig
from model.trellis.rank_weights import VALUES, served_shapes

EMBEDDING = "embedding.weight"
_BEYOND_ONE_LOOP = re.compile(
    r"specialisation\.gains\.(?!1\.).*|specialisation\.adapters\..*|engine\.routers\..*|exit_heads\..*|.*\.w_g"
)


def one_loop_reads(config: TrellisConfig, rank: int, world: int, dtype: str) -> WeightBytes:
    """Weights in `dtype`. Of the bank's rows that a token looks up, a rank has its share; logits are rank 0's.

    Slots are looked up evenly: which of a step's fall to the busier rank is left to chance.
    """
    element = DTYPE_BYTES[dtype]
    shapes = served_shapes(config)
    dense = sum(prod(shape) for key, shape in shapes.items() if key not in (VALUES, EMBEDDING) and not _BEYOND_ONE_LOOP.match(key))
    entries = BANK_READ_POINTS * config.bank_heads * config.bank_top_k * config.bank_value_dim
    matrices = config.gdn_heads * config.gdn_key_dim * config.gdn_value_dim
    instance = (config.gdn_conv - 1) * config.gdn_channels * element + matrices * DTYPE_BYTES["float32"]
    return WeightBytes(
        expert=0,
        head=prod(shapes[EMBEDDING]) * element if rank == 0 else 0,
        dense=dense * element,
        row=entries * element // world,
        state=config.layers.count(GDN) * instance,
    )
