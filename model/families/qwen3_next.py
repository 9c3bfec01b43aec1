"""Qwen3-Next: hybrid layers, projections of the DeltaNet interleaved by key head, experts with a shared one."""

from __future__ import annotations

from model.config import ModelConfig
from model.families.common import decoder_weights, routed, sparse_layers
from model.families.decoders import decoder_family
from model.families.delta_weights import delta_interleaved
from model.families.fields import Json, flag
from model.families.hybrid import hybrid_config, hybrid_moe
from model.families.weights import Place
from model.pieces import WeightMap


def configure(config: Json, architecture: str) -> ModelConfig:
    """Read a Qwen3-Next config.json."""
    moe = hybrid_moe(config, normalise=flag(config, "norm_topk_prob", True))
    sparse = sparse_layers(config, moe.num_experts if moe else 0)
    return hybrid_config(config, config, architecture, "qwen3_next", routed(moe) if moe else None, sparse)


def weights(place: Place) -> WeightMap:
    """The multi-token-prediction layer is left unread."""
    return decoder_weights(place, delta=delta_interleaved, ignored=("mtp.",))


FAMILY = decoder_family("qwen3_next", ("Qwen3NextForCausalLM",), configure, weights)
