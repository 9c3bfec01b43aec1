"""Configurations of the models that are measured, as their config.json states them; most without their vision part.

Written into a folder without weights, they are what `--load-format dummy` needs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from model.trellis.checkpoint import config_to_json
from model.trellis.presets import PRESETS

PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3.5-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
    "qwen3-next-80b-a3b": {
        "architectures": ["Qwen3NextForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
}

CONFIGS: dict[str, dict[str, Any]] = {
    **PUBLISHED,
    "trellis-180m": config_to_json(replace(PRESETS["trellis-180m"], aux=None)),
}
"""By name, all that are measured."""

TINY = "tiny"

VISION_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3.5-35b-a3b": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": 248056,
        "model_type": "qwen3_5_moe",
        "text_config": {name: value for name, value in CONFIGS["qwen3.5-35b-a3b"].items() if name != "architectures"},
        "tie_word_embeddings": False,
        "video_token_id": 248057,
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "in_channels": 3,
            "intermediate_size": 4304,
            "model_type": "qwen3_5_moe",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 2048,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    },
    TINY: {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "dtype": "float32",
        "image_token_id": 500,
        "model_type": "qwen3_5_moe",
        "text_config": {
            **CONFIGS["qwen3.5-35b-a3b"],
            "dtype": "float32",
            "eos_token_id": 2,
            "head_dim": 32,
            "hidden_size": 64,
            "linear_key_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 16,
            "max_position_embeddings": 16384,
            "moe_intermediate_size": 32,
            "num_attention_heads": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "rope_parameters": {
                **CONFIGS["qwen3.5-35b-a3b"]["rope_parameters"],
                "mrope_section": [2, 1, 1],
            },
            "shared_expert_intermediate_size": 32,
            "vocab_size": 512,
        },
        "tie_word_embeddings": False,
        "video_token_id": 501,
        "vision_config": {
            "depth": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 64,
            "in_channels": 3,
            "intermediate_size": 96,
            "model_type": "qwen3_5_moe",
            "num_heads": 2,
            "num_position_embeddings": 144,
            "out_hidden_size": 64,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 503,
        "vision_start_token_id": 502,
    },
}
"""Models with their vision parts: a published one, and a tiny one for a CPU."""


def write_config(name: str, folder: Path, layers: int | None = None) -> None:
    """Put the configuration `name` into `folder` as config.json; `layers` shortens the model, for quick looks at its layers.

    Raises ValueError for `layers` of a model whose layers are not just counted.
    """
    config = dict(CONFIGS[name])
    if layers is not None:
        if "num_hidden_layers" not in config:
            raise ValueError(f"{name} is not shortened to a number of layers")
        config["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def write_vision_config(name: str, folder: Path, layers: int | None = None) -> None:
    """Put a configuration with its vision part into `folder`; `layers` shortens the text model, not the tower."""
    config = dict(VISION_CONFIGS[name])
    if layers is not None:
        config["text_config"] = config["text_config"] | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
