"""Model folders with a config.json alone, tiny in layers but wide in what a step computes: for dummy weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_BASE: dict[str, Any] = {
    "vocab_size": 50_000,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
_DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "shared_expert_intermediate_size": 256,
    "partial_rotary_factor": 0.25,
}

WIDE: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_EXPERTS},
    "all experts": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "sliding_window": 100,
    },
    "hybrid": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **_EXPERTS, **_DELTA},
}


def wide_folder(kind: str, path: Path, **fields: Any) -> Path:
    """Write the folder of `WIDE[kind]`, with `fields` of config.json changed."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**_BASE, **WIDE[kind], **fields}))
    return path
