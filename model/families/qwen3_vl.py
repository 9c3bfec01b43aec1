"""Qwen3-VL, dense and MoE: Qwen3 with three-part rotary positions, and a vision tower with deepstack features."""

from __future__ import annotations

from dataclasses import replace

from model.config import ModelConfig, MoeConfig
from model.errors import UnsupportedModel
from model.families.common import attention_shape, basics, decoder_weights, layers_of, routed, sparse_layers
from model.families.decoders import decoder_family
from model.families.fields import Json, count, eos_tokens, whole
from model.families.rope import read_rope
from model.families.vision import text_part, vision_part, vision_weights
from model.families.weights import Place
from model.pieces import WeightMap
from model.spec import LayerKind

MOE = "Qwen3VLMoeForConditionalGeneration"
SECTIONS = (24, 20, 20)
"""Frequencies of each part of a position where the configuration names none."""


def configure(config: Json, architecture: str) -> ModelConfig:
    """Read a Qwen3-VL or Qwen3-VL-MoE config.json; without a `vision_config` the model takes text alone."""
    text = text_part(config, architecture)
    attention = attention_shape(text, qk_norm=True)
    rope, positions = read_rope(text, attention.head_dim, theta=500_000.0, sections=SECTIONS)
    moe = _moe(text, architecture) if architecture == MOE else None
    sparse = sparse_layers(text, moe.num_experts if moe else 0)
    model = ModelConfig(
        **basics(text, config, architecture, "qwen3_vl_moe" if architecture == MOE else "qwen3_vl"),
        intermediate_size=count(text, "intermediate_size") if all(sparse) else whole(text, "intermediate_size"),
        layers=layers_of([LayerKind.FULL] * len(sparse), sparse),
        attention=attention,
        moe=moe if any(sparse) else None,
        rope=rope,
        max_positions=positions,
        eos_token_ids=eos_tokens(text, config),
    )
    return replace(model, vision=vision_part(config, model, deepstack=True))


def _moe(text: Json, architecture: str) -> MoeConfig:
    """The chosen experts' weights are always divided by their sum."""
    experts = count(text, "num_experts") or count(text, "num_local_experts")
    if not experts:
        raise UnsupportedModel(f"config.json of {architecture} has no num_experts")
    return routed(
        MoeConfig(
            num_experts=experts,
            top_k=whole(text, "num_experts_per_tok"),
            intermediate=whole(text, "moe_intermediate_size"),
            normalise=True,
        )
    )


def weights(place: Place) -> WeightMap:
    """Text tensors lie below `model.language_model.`, the tower's below `model.visual.`."""
    return decoder_weights(place, prefixes=("model.language_model.", "model.", "language_model.model."), more=vision_weights)


FAMILY = decoder_family("qwen3_vl", ("Qwen3VLForConditionalGeneration", MOE), configure, weights)
