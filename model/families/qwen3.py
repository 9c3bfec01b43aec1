"""Qwen3 and Qwen3-MoE: norms on query and key heads; dense layers, or experts in the layers that the configuration names."""

from __future__ import annotations

from model.config import ModelConfig, MoeConfig
from model.families.common import (
    attention_shape,
    basics,
    decoder_weights,
    layer_kinds,
    layers_of,
    routed,
    sparse_layers,
)
from model.families.decoders import decoder_family
from model.families.fields import Json, count, eos_tokens, flag, refuse, whole
from model.families.rope import read_rope
from model.spec import LayerKind

MOE = "Qwen3MoeForCausalLM"


def configure(config: Json, architecture: str) -> ModelConfig:
    """Read a Qwen3 or Qwen3-MoE config.json."""
    attention = attention_shape(config, qk_norm=True)
    rope, positions = read_rope(config, attention.head_dim, theta=10_000.0)
    moe = _moe(config) if architecture == MOE else None
    sparse = sparse_layers(config, moe.num_experts if moe else 0)
    window = whole(config, "sliding_window") if flag(config, "use_sliding_window", False) else None
    return ModelConfig(
        **basics(config, config, architecture, "qwen3_moe" if architecture == MOE else "qwen3"),
        intermediate_size=whole(config, "intermediate_size"),
        layers=layers_of(_kinds(config, architecture, window), sparse, window),
        attention=attention,
        moe=moe if any(sparse) else None,
        rope=rope,
        max_positions=positions,
        eos_token_ids=eos_tokens(config),
    )


def _moe(config: Json) -> MoeConfig | None:
    # Older files say num_experts, newer ones num_local_experts.
    experts = count(config, "num_experts") or count(config, "num_local_experts")
    if not experts:
        return None
    return routed(
        MoeConfig(
            num_experts=experts,
            top_k=whole(config, "num_experts_per_tok"),
            intermediate=whole(config, "moe_intermediate_size"),
            normalise=flag(config, "norm_topk_prob", False),
        )
    )


def _kinds(config: Json, architecture: str, window: int | None) -> tuple[LayerKind, ...]:
    """Qwen3-MoE slides in every layer or in none; Qwen3 in the layers that `layer_types` names, or from `max_window_layers` on."""
    if architecture == MOE:
        usual = LayerKind.FULL if window is None else LayerKind.SLIDING
        return layer_kinds(config, (usual,), lambda number: usual)
    first = count(config, "max_window_layers", 28) if window is not None else whole(config, "num_hidden_layers")
    kinds = layer_kinds(
        config, (LayerKind.FULL, LayerKind.SLIDING), lambda number: LayerKind.SLIDING if number >= first else LayerKind.FULL
    )
    if window is None and LayerKind.SLIDING in kinds:
        raise refuse("use_sliding_window", False, "true, with a sliding_window, where layer_types names sliding_attention")
    return kinds


FAMILY = decoder_family("qwen3", ("Qwen3ForCausalLM", MOE), configure, decoder_weights)
