"""How much of an encoding goes between two steps: as much as a piece of a prompt costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model.spec import LayerKind

if TYPE_CHECKING:
    from model.config import LayerConfig, ModelConfig


def chunk_cost(config: ModelConfig, rows: int) -> float:
    """An estimate of the floating point operations of a prompt piece of `rows` rows: two for each weight that a row meets.

    Attention over earlier positions, norms and logits are left out.
    """
    return 2.0 * rows * sum(_active(config, layer) for layer in config.layers)


def _active(config: ModelConfig, layer: LayerConfig) -> int:
    """Weights of one layer that a row meets."""
    hidden, attention, delta, moe = config.hidden_size, config.attention, config.delta, config.moe
    if layer.kind is LayerKind.LINEAR and delta is not None:
        mixer = hidden * (delta.conv_width + 2 * delta.value_width + 2 * delta.value_heads)
    else:
        width, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        mixer = hidden * (width * (3 if attention.output_gate else 2) + 2 * kv)
    if layer.sparse and moe is not None:
        return mixer + hidden * (moe.num_experts + 3 * (moe.top_k * moe.intermediate + moe.shared_intermediate))
    return mixer + 3 * hidden * config.intermediate_size
