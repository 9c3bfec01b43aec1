"""Small random checkpoints of every family, written by transformers, and transformers' logits for them.

`VARIANTS` names the shapes of each family: odd head counts, ten experts, every kind of rotary scaling, both expert layouts, tied
and untied. All are float32 with a vocabulary of 131, and give the same weights on every call.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 131

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ODD_HEADS = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
_GROUPED = {"hidden_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
_HYBRID = {
    "num_hidden_layers": 4,
    # A small epsilon would let the norm of the recurrence's smallest outputs blow up their rounding errors.
    "rms_norm_eps": 1e-3,
    "hidden_size": 40,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 56,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
}
_HYBRID_MOE = {
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
_ALIKE = {**_HYBRID_MOE, "shared_expert_intermediate_size": 24}
"""The shared expert has the size of a routed one, as in published models."""
_WIDE_VALUES = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 40,
    "num_position_embeddings": 16,
}
_QWEN_MOE = {
    "intermediate_size": 56,
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=128)
_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "plain": {**_ODD_HEADS, "intermediate_size": 56},
        "llama3": {**_ODD_HEADS, "intermediate_size": 56, "tie_word_embeddings": True, **_LLAMA3},
        "linear": {**_ODD_HEADS, "intermediate_size": 56, **_rope("linear", factor=2.5)},
        "dynamic": {**_ODD_HEADS, "intermediate_size": 56, **_rope("dynamic", factor=2.0)},
        "bias": {**_ODD_HEADS, "intermediate_size": 56, "attention_bias": True},
    },
    "mixtral": {
        "plain": {**_GROUPED, "intermediate_size": 24, "num_local_experts": 10, "num_experts_per_tok": 2},
        "window": {
            **_GROUPED,
            "intermediate_size": 24,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "tie_word_embeddings": True,
        },
        "all": {**_ODD_HEADS, "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 8},
        "fused": {**_GROUPED, "intermediate_size": 24, "num_local_experts": 10, "num_experts_per_tok": 2},
        "few": {
            **_GROUPED,
            "intermediate_size": 24,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
        },
    },
    "qwen3": {
        "plain": {**_GROUPED, "intermediate_size": 56, "tie_word_embeddings": True},
        "window": {
            **_GROUPED,
            "intermediate_size": 56,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 17,
            "max_window_layers": 1,
        },
    },
    "qwen3_moe": {
        "plain": {**_GROUPED, **_QWEN_MOE},
        "yarn": {**_GROUPED, **_QWEN_MOE, **_YARN, "norm_topk_prob": True, "tie_word_embeddings": True},
        "mixed": {**_GROUPED, **_QWEN_MOE, "num_hidden_layers": 5, "mlp_only_layers": [3], "decoder_sparse_step": 2},
        "fused": {**_GROUPED, **_QWEN_MOE, "norm_topk_prob": True},
    },
    "qwen3_next": {
        "plain": {**_HYBRID, **_HYBRID_MOE},
        "mixed": {
            **_HYBRID,
            **_ALIKE,
            **_WIDE_VALUES,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    },
    "qwen3_5": {
        "plain": {**_HYBRID, "tie_word_embeddings": True},
        "vision": {**_HYBRID, **_WIDE_VALUES},
    },
    "qwen3_5_moe": {
        "plain": {**_HYBRID, **_HYBRID_MOE},
        "fused": {**_HYBRID, **_ALIKE, **_WIDE_VALUES},
        "vision": {**_HYBRID, **_HYBRID_MOE, **_WIDE_VALUES},
    },
}

DIVISIBLE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
"""Heads for two ranks, and for four that share the key/value heads."""
_DIVISIBLE_HYBRID = {
    **_HYBRID,
    **DIVISIBLE,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_BY_HEADS: dict[str, dict[str, Any]] = {
    "llama": {**VARIANTS["llama"]["bias"], **DIVISIBLE},
    "mixtral": {**VARIANTS["mixtral"]["window"], **DIVISIBLE},
    "qwen3": {**VARIANTS["qwen3"]["window"], **DIVISIBLE},
    "qwen3_moe": {**VARIANTS["qwen3_moe"]["mixed"], **DIVISIBLE},
    "qwen3_next": {**_DIVISIBLE_HYBRID, **_ALIKE, "mlp_only_layers": [1]},
    "qwen3_5": {**_DIVISIBLE_HYBRID, "tie_word_embeddings": True},
    "qwen3_5_moe": {**_DIVISIBLE_HYBRID, **_ALIKE},
}
"""The variant `heads` of each family: its heads and the units of its dense MLPs divide by 2 and by 4, and kernels take the
sizes of all its heads. It is not among CASES."""

CASES: tuple[tuple[str, str], ...] = tuple((family, variant) for family, variants in VARIANTS.items() for variant in variants)

_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
}


def make_checkpoint(family: str, variant: str, path: Path, *, vocab_size: int = VOCAB) -> Path:
    """Write the checkpoint into the folder `path` unless it is there; returns `path`. `vocab_size` fits it to a tokenizer."""
    if (path / "config.json").exists():
        return path
    model = _build(family, variant, vocab_size)
    randomise(model, seed=len(family) * 100 + len(variant))
    # Without the original format, transformers keeps a layer's experts in one tensor.
    model.save_pretrained(path, save_original_format=variant != "fused")
    return path


def read_config(path: Path) -> dict[str, Any]:
    """The folder's config.json."""
    return json.loads((path / "config.json").read_text())


def hf_logits(path: Path, ids: list[int]) -> torch.Tensor:
    """transformers' logits `[len(ids), vocab]` in float32 for one prompt, without a cache."""
    with torch.no_grad():
        return _reference(path)(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens, none of them special."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def clear_prompt(path: Path, length: int, seed: int = 0) -> list[int]:
    """A random prompt in which no row is nearly undecided between experts, so that rounding decides nothing."""
    attempts = (prompt(length, seed + 100 * attempt) for attempt in range(50))
    return next(tokens for tokens in attempts if routing_margin(path, tokens) > CLEAR_MARGIN)


CLEAR_MARGIN = 1e-4


def routing_margin(path: Path, ids: list[int]) -> float:
    """The smallest gap, over rows and layers, between the router logits of the last expert chosen and the first one not chosen."""
    return smallest_margin(_reference(path), lambda: hf_logits(path, ids))


def smallest_margin(model: nn.Module, run: Callable[[], object]) -> float:
    """`routing_margin` of whatever `run` has transformers' `model` compute."""
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    margins = [float("inf")]

    def record(router: nn.Module, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        ordered = output[0].sort(-1, descending=True).values
        if router.top_k < ordered.shape[-1]:
            margins.append(float((ordered[:, router.top_k - 1] - ordered[:, router.top_k]).min()))

    hooks = [router.register_forward_hook(record) for router in routers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return min(margins)


def _build(family: str, variant: str, vocab_size: int) -> nn.Module:
    config_class, model_class = _CLASSES[family]
    shape = _BY_HEADS[family] if variant == "heads" else VARIANTS[family][variant]
    settings = {**_BASE, **shape, "vocab_size": vocab_size}
    config = getattr(transformers, config_class)(**settings)
    if variant == "vision":
        model_class = model_class.replace("ForCausalLM", "ForConditionalGeneration")
        # Placeholders that no prompt here has.
        tokens = {"image_token_id": 1, "video_token_id": 0}
        both = getattr(transformers, config_class.replace("Text", ""))
        config = both(text_config=config.to_dict(), vision_config=_VISION, **tokens)
    config.dtype = torch.float32
    return getattr(transformers, model_class)(config).eval()


@cache
def _reference(path: Path) -> nn.Module:
    architecture = read_config(path)["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.set_experts_implementation("eager")
    return model.eval()


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Values that make every parameter matter: matrices that keep the scale of their input, norms and biases away from neutral."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("A_log", "dt_bias")):
            parameter.copy_(noise * 0.5)
        elif parameter.dim() == 1:
            neutral = parameter.mean() if "norm" in name else 0.0
            parameter.copy_(neutral + 0.2 * noise)
        elif "conv1d" in name:
            parameter.copy_(noise * 2.0)
        else:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
