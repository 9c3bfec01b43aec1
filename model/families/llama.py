"""Llama: dense layers, full attention."""

from __future__ import annotations

from model.config import ModelConfig
from model.families.common import attention_shape, basics, decoder_weights, layer_kinds, layers_of
from model.families.decoders import decoder_family
from model.families.fields import Json, eos_tokens, whole
from model.families.rope import read_rope
from model.spec import LayerKind


def configure(config: Json, architecture: str) -> ModelConfig:
    """Read a Llama config.json."""
    attention = attention_shape(config)
    rope, positions = read_rope(config, attention.head_dim, theta=10_000.0)
    kinds = layer_kinds(config, (LayerKind.FULL,), lambda number: LayerKind.FULL)
    return ModelConfig(
        **basics(config, config, architecture, "llama"),
        intermediate_size=whole(config, "intermediate_size"),
        layers=layers_of(kinds, [False] * len(kinds)),
        attention=attention,
        rope=rope,
        max_positions=positions,
        eos_token_ids=eos_tokens(config),
    )


FAMILY = decoder_family("llama", ("LlamaForCausalLM",), configure, decoder_weights)
