"""What one rank reads of a checkpoint of layout 1: all tensors but auxiliary heads, of the bank's value table its own rows."""

from __future__ import annotations

import torch

from model.pieces import Index, Piece, WeightMap
from model.trellis.bank import WHOLE
from model.trellis.config import TrellisConfig
from model.trellis.graph import Graph
from model.trellis.initial import starts_as_one
from model.trellis.serving import AUX_PREFIX
from model.trellis.settings import ModelSettings

VALUES = "bank.values"


def served_shapes(config: TrellisConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that serving needs, by its key in a checkpoint, in whole."""
    with torch.device("meta"):
        graph = Graph(config, ModelSettings(), WHOLE)
    return {key: tuple(parameter.shape) for key, parameter in graph.named_parameters()}


def rank_weights(config: TrellisConfig, rank: int, world: int) -> WeightMap:
    """The reads of a rank. A parameter bears the key of its tensor."""
    shapes = served_shapes(config)
    own: Index = (slice(rank, None, world),)
    return WeightMap(
        pieces={key: (Piece(name=key, shape=shape, source=own if key == VALUES else ()),) for key, shape in shapes.items()},
        ignored=(AUX_PREFIX,),
        neutral={key: 1.0 for key in shapes if starts_as_one(key)},
    )
