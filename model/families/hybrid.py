"""What Qwen3-Next and Qwen3.5 share: three Gated DeltaNet layers to each gated attention layer, zero-centred norms."""

from __future__ import annotations

from model.config import DeltaNetConfig, LayerConfig, ModelConfig, MoeConfig
from model.families.common import attention_shape, basics, layer_kinds, layers_of
from model.families.fields import Json, count, eos_tokens, flag, refuse, whole
from model.families.rope import read_rope
from model.spec import LayerKind


def hybrid_config(
    config: Json,
    outer: Json,
    architecture: str,
    family: str,
    moe: MoeConfig | None,
    sparse: tuple[bool, ...],
    sections: tuple[int, ...] = (),
) -> ModelConfig:
    """The configuration, given its experts and the layers that have them. `config` is the text part of `outer`.

    `sections` are the family's default frequencies of each part of a three-part position.
    """
    if not flag(config, "attn_output_gate", True):
        raise refuse("attn_output_gate", False, "true")
    attention = attention_shape(config, qk_norm=True, output_gate=True)
    rope, positions = read_rope(config, attention.head_dim, theta=10_000.0, partial=0.25, sections=sections)
    return ModelConfig(
        **basics(config, outer, architecture, family),
        intermediate_size=count(config, "intermediate_size") if all(sparse) else whole(config, "intermediate_size"),
        layers=_layers(config, sparse),
        attention=attention,
        delta=_delta(config),
        moe=moe if any(sparse) else None,
        rope=rope,
        zero_centered=True,
        max_positions=positions,
        eos_token_ids=eos_tokens(config, outer),
    )


def _layers(config: Json, sparse: tuple[bool, ...]) -> tuple[LayerConfig, ...]:
    interval = whole(config, "full_attention_interval", 4)
    kinds = layer_kinds(
        config,
        (LayerKind.FULL, LayerKind.LINEAR),
        lambda number: LayerKind.LINEAR if (number + 1) % interval else LayerKind.FULL,
    )
    return layers_of(kinds, sparse)


def _delta(config: Json) -> DeltaNetConfig:
    shape = DeltaNetConfig(
        key_heads=whole(config, "linear_num_key_heads"),
        value_heads=whole(config, "linear_num_value_heads"),
        key_dim=whole(config, "linear_key_head_dim"),
        value_dim=whole(config, "linear_value_head_dim"),
        kernel=whole(config, "linear_conv_kernel_dim"),
    )
    if shape.value_heads % shape.key_heads:
        raise refuse("linear_num_value_heads", shape.value_heads, f"a multiple of linear_num_key_heads = {shape.key_heads}")
    if shape.kernel < 2:
        raise refuse("linear_conv_kernel_dim", shape.kernel, "2 or more")
    return shape


def hybrid_moe(config: Json, *, normalise: bool) -> MoeConfig | None:
    """Experts and the shared expert; None when the configuration has no experts."""
    experts = count(config, "num_experts") or count(config, "num_local_experts")
    if not experts:
        return None
    return MoeConfig(
        num_experts=experts,
        top_k=whole(config, "num_experts_per_tok"),
        intermediate=whole(config, "moe_intermediate_size"),
        normalise=normalise,
        shared_intermediate=whole(config, "shared_expert_intermediate_size"),
    )
