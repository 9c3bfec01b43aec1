"""A small mixture-of-experts checkpoint with random weights in float32, for benchmarks of everything but the arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD, EXPERTS, EXPERT, LAYERS = 512, 64, 4, 2, 16, 8, 32, 2
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "moe_intermediate_size": EXPERT,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def write_tiny(folder: Path) -> None:
    """Put config.json and model.safetensors into `folder`; the same weights each time."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes().items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor by its name in the published format."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found |= {f"{at}.{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        found |= {f"{at}.self_attn.{norm}.weight": (HEAD,) for norm in ("q_norm", "k_norm")}
        found |= {f"{at}.self_attn.{part}_proj.weight": (KV_HEADS * HEAD, HIDDEN) for part in ("k", "v")}
        found |= {f"{at}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN), f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD)}
        found[f"{at}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            within = f"{at}.mlp.experts.{expert}"
            found |= {f"{within}.{part}_proj.weight": (EXPERT, HIDDEN) for part in ("gate", "up")}
            found[f"{within}.down_proj.weight"] = (HIDDEN, EXPERT)
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
