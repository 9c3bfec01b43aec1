"""What is read from a config.json, and what is refused, by field and value, before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from model.errors import UnsupportedModel
from model.families.registry import resolve, spec_of, supported
from model.spec import LayerKind, Rewind

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
NEXT = QWEN3_MOE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 8,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: silu"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias = True is not supported"),
    (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "torch_dtype = 'float8_e4m3fn' is not supported; supported: bfloat16"),
    (LLAMA, {"rope_scaling": {"type": "longrope"}}, "rope_type = 'longrope' is not supported; supported: default, linear"),
    (LLAMA, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "has no low_freq_factor"),
    (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": -1.0}}, "factor = -1.0 is not supported"),
    (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}}, "beta_fast = 3.0 is not supported"),
    (LLAMA, {"partial_rotary_factor": 0.1}, "partial_rotary_factor = 0.1 is not supported"),
    (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quant_method = 'fp8' is not supported"),
    (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads = 3 is not supported; supported: a divisor"),
    (LLAMA, {"num_hidden_layers": "2"}, "num_hidden_layers = '2' is not supported"),
    (LLAMA, {"vocab_size": None}, "has no vocab_size"),
    (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
    (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = 'sliding_attention' is not supported"),
    (LLAMA, {"layer_types": ["full_attention"]}, "layer_types = .* one for each of num_hidden_layers = 2"),
    (LLAMA, {"eos_token_id": "</s>"}, "eos_token_id = '</s>' is not supported"),
    (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes' is not supported"),
    (MIXTRAL, {"attention_bias": True}, "attention_bias = True is not supported"),
    (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is not supported; supported: at most"),
    (MIXTRAL, {"num_local_experts": 0}, "num_local_experts = 0 is not supported"),
    (MIXTRAL, {"sliding_window": 0}, "sliding_window = 0 is not supported"),
    (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window = False is not supported"),
    (QWEN3, {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types = 'chunked_attention' is not supported"),
    (QWEN3_MOE, {"mlp_only_layers": [2]}, r"mlp_only_layers = \[2\] is not supported"),
    (QWEN3_MOE, {"moe_intermediate_size": None}, "has no moe_intermediate_size"),
    (NEXT, {"linear_num_value_heads": 3}, "linear_num_value_heads = 3 is not supported"),
    (NEXT, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1 is not supported"),
    (NEXT, {"attn_output_gate": False}, "attn_output_gate = False is not supported"),
    (NEXT, {"layer_types": ["sliding_attention"] * 8}, "layer_types = 'sliding_attention' is not supported"),
]


@pytest.mark.parametrize(
    ("config", "change", "told"), REFUSED, ids=[f"{c['architectures'][0]}-{told[:30]}" for c, _, told in REFUSED]
)
def test_refused_by_name(config: dict[str, Any], change: dict[str, Any], told: str) -> None:
    assert resolve(config)
    with pytest.raises(UnsupportedModel, match=told):
        resolve(config | change)


@pytest.mark.parametrize("architectures", [["GptOssForCausalLM"], [], None, ["LlamaForCausalLM", "MixtralForCausalLM"]], ids=str)
def test_unknown_architecture(architectures: object) -> None:
    with pytest.raises(UnsupportedModel, match="MixtralForCausalLM") as refusal:
        resolve(LLAMA | {"architectures": architectures})
    assert str(architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else architectures) in str(
        refusal.value
    )


def test_supported_architectures() -> None:
    assert supported() == (
        "LlamaForCausalLM",
        "MixtralForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "TrellisForCausalLM",
    )


def test_what_is_read() -> None:
    config = resolve(LLAMA)
    assert (config.dtype, config.eos_token_ids, config.tied, config.attention.head_dim) == ("bfloat16", (2,), False, 16)
    newer = {key: value for key, value in LLAMA.items() if key != "torch_dtype"} | {"dtype": "float16"}
    assert resolve(newer, {"eos_token_id": [2, 7]}).dtype == "float16"
    assert resolve(newer, {"eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert resolve(newer, {"eos_token_id": None}).eos_token_ids == (2,)


def test_layers_with_experts() -> None:
    config = resolve(QWEN3_MOE | {"num_hidden_layers": 7, "mlp_only_layers": [3], "decoder_sparse_step": 2})
    assert config.moe_layers == (1, 5)
    dense = resolve(QWEN3_MOE | {"mlp_only_layers": [0, 1]})
    assert (dense.moe, dense.moe_layers, spec_of(dense).num_experts) == (None, (), 0)


def test_windows() -> None:
    mixtral = resolve(MIXTRAL | {"sliding_window": 32})
    assert [(layer.kind, layer.window) for layer in mixtral.layers] == [(LayerKind.SLIDING, 32)] * 2
    unused = resolve(QWEN3_MOE | {"sliding_window": 32, "use_sliding_window": False})
    assert [layer.window for layer in unused.layers] == [None, None]
    some = resolve(QWEN3 | {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1})
    assert [layer.window for layer in some.layers] == [None, 32]


def test_spec_of_a_hybrid() -> None:
    spec = spec_of(resolve(NEXT))
    assert [kind is LayerKind.FULL for kind in spec.layer_kinds] == [False, False, False, True] * 2
    assert [cache.layer for cache in spec.caches] == [3, 7]
    assert (spec.caches[0].kv_heads, spec.caches[0].head_dim) == (2, 16)
    states = {(state.layer, state.name): state for state in spec.states}
    assert sorted(states) == [(layer, name) for layer in (0, 1, 2, 4, 5, 6) for name in ("conv", "h")]
    assert (states[0, "conv"].shape, states[0, "conv"].dtype) == ((2 * 2 * 8 + 4 * 16, 3), "model")
    assert (states[0, "h"].shape, states[0, "h"].dtype) == ((4, 8, 16), "float32")
    assert states[0, "h"].rewind is Rewind.SNAPSHOT
    assert not spec.rewindable
    assert (spec.num_experts, spec.experts_per_token, spec.moe_layers) == (8, 2, tuple(range(8)))
