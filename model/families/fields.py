"""Reading config.json: typed fields, and refusals that name field, value and what is supported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.errors import UnsupportedModel

Json = Mapping[str, Any]

DTYPES = ("bfloat16", "float16", "float32")

INERT: Mapping[str, Any] = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "clip_qkv": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "attention_chunk_size": None,
    "mlp_bias": False,
    "use_qk_norm": None,
    "no_rope_layers": None,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "rope_interleaved": False,
}
"""Options of neighbouring architectures that change what is computed, with the one value (or null) that does not."""


def refuse(field: str, value: object, supported: str) -> UnsupportedModel:
    """The error for a field whose value is not served."""
    return UnsupportedModel(f"config.json: {field} = {value!r} is not supported; supported: {supported}")


def whole(config: Json, field: str, default: int | None = None) -> int:
    """A positive integer. Raises UnsupportedModel when it is missing without a default, or something else."""
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise UnsupportedModel(f"config.json has no {field}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refuse(field, value, "a positive integer")
    return value


def count(config: Json, field: str, default: int = 0) -> int:
    """An integer that may be 0."""
    value = config.get(field)
    value = default if value is None else value
    return 0 if value == 0 else whole(config, field, value)


def real(config: Json, field: str, default: float | None = None) -> float:
    """A positive number. Raises UnsupportedModel when it is missing without a default, or something else."""
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise UnsupportedModel(f"config.json has no {field}")
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise refuse(field, value, "a positive number")
    return float(value)


def flag(config: Json, field: str, default: bool) -> bool:
    """true or false; null is the default."""
    value = config.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refuse(field, value, "true or false")
    return value


def dtype_of(*sections: Json) -> str:
    """The checkpoint's dtype, from `dtype` or the older `torch_dtype` of the first section that has one; bfloat16 without any."""
    for section in sections:
        for field in ("dtype", "torch_dtype"):
            value = section.get(field)
            if value is not None:
                name = str(value).removeprefix("torch.")
                if name not in DTYPES:
                    raise refuse(field, value, ", ".join(DTYPES))
                return name
    return "bfloat16"


def eos_tokens(*sections: Json) -> tuple[int, ...]:
    """End tokens of the first section that names any."""
    for section in sections:
        value = section.get("eos_token_id")
        if value is not None:
            tokens = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in tokens):
                raise refuse("eos_token_id", value, "a token id or a list of them")
            return tuple(tokens)
    return ()


def check_common(config: Json) -> None:
    """Refuse activations and options that change the computation and that no served family has."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise refuse("hidden_act", config["hidden_act"], "silu")
    for field, inert in INERT.items():
        value = config.get(field)
        if value is not None and value != inert:
            raise refuse(field, value, "absent" if inert is None else repr(inert))
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unnamed")
        raise refuse("quantization_config.quant_method", method, f"unquantised weights in {', '.join(DTYPES)}")
