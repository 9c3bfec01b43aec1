"""The rotary part of config.json: `rope_parameters`, and the `rope_theta` and `rope_scaling` of older checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping

from model.config import RopeConfig, RopeKind
from model.families.fields import Json, flag, real, refuse, whole

ALLOWED: Mapping[RopeKind, frozenset[str]] = {
    RopeKind.DEFAULT: frozenset(),
    RopeKind.LINEAR: frozenset({"factor"}),
    RopeKind.DYNAMIC: frozenset({"factor"}),
    RopeKind.YARN: frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    RopeKind.LLAMA3: frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
}
"""Parameters that each kind reads."""

COMMON = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "mrope_section",
        "mrope_interleaved",
        "original_max_position_embeddings",
    }
)


def read_rope(
    config: Json, head_dim: int, *, theta: float, partial: float = 1.0, sections: tuple[int, ...] = ()
) -> tuple[RopeConfig, int]:
    """The rotary embedding, and the positions that it allows. `theta`, `partial` and `sections` are the family's defaults.

    Raises UnsupportedModel for a kind or a parameter that is not served.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = _kind(scaling)
    strange = sorted(set(scaling) - COMMON - ALLOWED[kind])
    if strange:
        raise refuse(f"rope_parameters.{strange[0]}", scaling[strange[0]], f"absent for rope_type {kind.value!r}")
    fraction = real(scaling, "partial_rotary_factor", real(config, "partial_rotary_factor", partial))
    rotary_dim = int(head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise refuse("partial_rotary_factor", fraction, f"an even number of the {head_dim} elements of a head")
    positions = whole(config, "max_position_embeddings")
    original = whole(scaling, "original_max_position_embeddings", positions)
    # Older checkpoints keep the positions of pre-training beside the scaling.
    original = whole(config, "original_max_position_embeddings", original)
    factor = 1.0 if kind is RopeKind.DEFAULT else real(scaling, "factor", positions / original if kind is RopeKind.YARN else None)
    rope = RopeConfig(
        kind=kind,
        rotary_dim=rotary_dim,
        theta=real(scaling, "rope_theta", real(config, "rope_theta", theta)),
        factor=factor,
        original_positions=original,
        attention_factor=_attention_factor(scaling, factor) if kind is RopeKind.YARN else 1.0,
        beta_fast=real(scaling, "beta_fast", 32.0),
        beta_slow=real(scaling, "beta_slow", 1.0),
        truncate=flag(scaling, "truncate", True),
        low_freq_factor=real(scaling, "low_freq_factor") if kind is RopeKind.LLAMA3 else 1.0,
        high_freq_factor=real(scaling, "high_freq_factor") if kind is RopeKind.LLAMA3 else 4.0,
        sections=_sections(scaling, sections),
    )
    return rope, max(positions, int(original * factor)) if kind is RopeKind.YARN else positions


def _kind(scaling: Json) -> RopeKind:
    name = scaling.get("rope_type", scaling.get("type", RopeKind.DEFAULT.value))
    # Qwen's multimodal checkpoints name their three-part positions as a type; text has the default frequencies.
    name = RopeKind.DEFAULT.value if name == "mrope" else name
    if name not in [kind.value for kind in RopeKind]:
        raise refuse("rope_parameters.rope_type", name, ", ".join(kind.value for kind in RopeKind))
    return RopeKind(name)


def _attention_factor(scaling: Json, factor: float) -> float:
    """What yarn multiplies cosines and sines by: given, or from `mscale` (DeepSeek's form), or 0.1 ln(factor) + 1."""

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return real(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(real(scaling, "mscale")) / magnitude(real(scaling, "mscale_all_dim"))
    return magnitude(1.0)


def _sections(scaling: Json, default: tuple[int, ...]) -> tuple[int, ...]:
    """`mrope_section`: how many frequencies follow each part of a three-part position. Only the interleaved order is served."""
    sections = scaling.get("mrope_section")
    if sections is None:
        return default
    if not flag(scaling, "mrope_interleaved", True):
        raise refuse("rope_parameters.mrope_interleaved", False, "true")
    if len(sections) != 3 or not all(isinstance(part, int) and part >= 0 for part in sections):
        raise refuse("rope_parameters.mrope_section", sections, "three counts")
    return tuple(sections)
