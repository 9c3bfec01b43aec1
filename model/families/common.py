"""What the families' readers and weight maps have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from model.config import AttentionConfig, LayerConfig, MoeConfig
from model.errors import UnsupportedModel
from model.families.fields import Json, check_common, dtype_of, flag, real, refuse, whole
from model.families.weights import ExpertNames, Pieces, Place, attention, ends, first_present, mlp, moe, norms
from model.pieces import WeightMap
from model.spec import LayerKind


def basics(config: Json, outer: Json, architecture: str, family: str) -> dict[str, Any]:
    """The arguments of ModelConfig that every family reads alike. `outer` is the whole config.json, `config` its text part."""
    check_common(config)
    check_common(outer)
    return {
        "architecture": architecture,
        "family": family,
        "dtype": dtype_of(config, outer),
        "vocab_size": whole(config, "vocab_size"),
        "hidden_size": whole(config, "hidden_size"),
        "norm_eps": real(config, "rms_norm_eps"),
        "tied": flag(outer, "tie_word_embeddings", flag(config, "tie_word_embeddings", False)),
    }


def attention_shape(config: Json, *, qk_norm: bool = False, output_gate: bool = False, bias: bool = True) -> AttentionConfig:
    """Heads and their options. `bias`: the family has an `attention_bias` option."""
    heads = whole(config, "num_attention_heads")
    kv_heads = whole(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    hidden = whole(config, "hidden_size")
    head_dim = whole(config, "head_dim", max(1, hidden // heads))
    biased = flag(config, "attention_bias", False)
    if biased and not bias:
        raise refuse("attention_bias", True, "false for this architecture")
    return AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=head_dim, qk_norm=qk_norm, output_gate=output_gate, bias=biased)


def layer_kinds(config: Json, allowed: Sequence[LayerKind], default: Callable[[int], LayerKind]) -> tuple[LayerKind, ...]:
    """The kind of each layer: `layer_types` if given, else `default` of its number."""
    layers = whole(config, "num_hidden_layers")
    named = config.get("layer_types")
    if named is None:
        return tuple(default(number) for number in range(layers))
    if len(named) != layers:
        raise refuse("layer_types", named, f"one for each of num_hidden_layers = {layers}")
    for kind in named:
        if kind not in [choice.value for choice in allowed]:
            raise refuse("layer_types", kind, ", ".join(allowed))
    return tuple(LayerKind(kind) for kind in named)


def sparse_layers(config: Json, num_experts: int) -> tuple[bool, ...]:
    """Which layers are routed, by `decoder_sparse_step` and `mlp_only_layers`."""
    layers = whole(config, "num_hidden_layers")
    step = whole(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    strange = [number for number in dense if not isinstance(number, int) or not 0 <= number < layers]
    if strange:
        raise refuse("mlp_only_layers", dense, f"layer numbers below {layers}")
    return tuple(num_experts > 0 and number not in dense and (number + 1) % step == 0 for number in range(layers))


def routed(moe: MoeConfig) -> MoeConfig:
    """The same, if it can be routed."""
    if moe.top_k > moe.num_experts:
        raise refuse("num_experts_per_tok", moe.top_k, f"at most the number of experts, {moe.num_experts}")
    return moe


def decoder_weights(
    place: Place,
    *,
    prefixes: Sequence[str] = ("model.",),
    moe_roots: Sequence[str] = ("mlp.",),
    experts: ExpertNames | None = None,
    delta: Callable[[Pieces, Place, str, str], None] | None = None,
    ignored: Sequence[str] = (),
    more: Callable[[Pieces, Place], None] | None = None,
) -> WeightMap:
    """The weight map of a decoder whose tensors have the usual names.

    The first of `prefixes` and of `moe_roots` under which the folder has a tensor is taken. `delta` maps a linear_attention layer;
    `more` adds what is not of the decoder.
    """
    config = place.config
    out = Pieces(ignored=list(ignored))
    prefix = first_present(place.manifest, prefixes, "embed_tokens.weight")
    out.ignored.append(f"{prefix}rotary_emb.")
    ends(out, place, prefix)
    for number, layer in enumerate(config.layers):
        target, source = f"layers.{number}.", f"{prefix}layers.{number}."
        norms(out, place, target, source)
        if layer.kind is not LayerKind.LINEAR:
            attention(out, place, f"{target}mixer.", f"{source}self_attn.")
        elif delta is not None:
            delta(out, place, f"{target}mixer.", f"{source}linear_attn.")
        else:
            raise UnsupportedModel(f"layer {number} of {config.architecture} is {layer.kind.value}, which this family has not")
        if layer.sparse:
            root = first_present(place.manifest, [source + root for root in moe_roots], "gate.weight")
            moe(out, place, f"{target}moe.", root, experts or ExpertNames())
        else:
            mlp(out, place, f"{target}mlp.", f"{source}mlp.", config.intermediate_size)
    if more is not None:
        more(out, place)
    return out.finish()


def layers_of(kinds: Sequence[LayerKind], sparse: Sequence[bool], window: int | None = None) -> tuple[LayerConfig, ...]:
    """Layer configurations; `window` goes to the sliding ones."""
    return tuple(
        LayerConfig(kind=kind, sparse=routed, window=window if kind is LayerKind.SLIDING else None)
        for kind, routed in zip(kinds, sparse, strict=True)
    )
