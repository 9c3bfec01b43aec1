"""Mixtral: every layer routed, experts named w1 (gate), w3 (up) and w2 (down); with `sliding_window` every layer slides."""

from __future__ import annotations

from model.config import ModelConfig, MoeConfig
from model.families.common import attention_shape, basics, decoder_weights, layer_kinds, layers_of, routed
from model.families.decoders import decoder_family
from model.families.fields import Json, eos_tokens, whole
from model.families.rope import read_rope
from model.families.weights import ExpertNames, Place
from model.pieces import WeightMap
from model.spec import LayerKind


def configure(config: Json, architecture: str) -> ModelConfig:
    """Read a Mixtral config.json."""
    attention = attention_shape(config, bias=False)
    rope, positions = read_rope(config, attention.head_dim, theta=1_000_000.0)
    window = whole(config, "sliding_window") if config.get("sliding_window") is not None else None
    usual = LayerKind.FULL if window is None else LayerKind.SLIDING
    kinds = layer_kinds(config, (usual,), lambda number: usual)
    units = whole(config, "intermediate_size")
    return ModelConfig(
        **basics(config, config, architecture, "mixtral"),
        intermediate_size=units,
        layers=layers_of(kinds, [True] * len(kinds), window),
        attention=attention,
        moe=routed(
            MoeConfig(
                num_experts=whole(config, "num_local_experts"),
                top_k=whole(config, "num_experts_per_tok"),
                intermediate=units,
                normalise=True,
            )
        ),
        rope=rope,
        max_positions=positions,
        eos_token_ids=eos_tokens(config),
    )


def weights(place: Place) -> WeightMap:
    """Checkpoints say `block_sparse_moe`; those written with fused experts may say `mlp`."""
    return decoder_weights(place, moe_roots=("block_sparse_moe.", "mlp."), experts=ExpertNames(gate="w1", up="w3", down="w2"))


FAMILY = decoder_family("mixtral", ("MixtralForCausalLM",), configure, weights)
