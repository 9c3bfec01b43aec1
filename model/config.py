"""What a model computes, as plain data: one frozen description that every family's config.json is read into. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from model.spec import LayerKind
from model.vision.config import VisionConfig


class RopeKind(StrEnum):
    """How rotary frequencies are stretched beyond the positions of pre-training."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LLAMA3 = "llama3"


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first `rotary_dim` elements of each head. The fields after `theta` matter to some kinds only.

    `sections` counts the frequencies that follow each part of a three-part position (temporal, height, width), interleaved; empty
    where positions have one part.
    """

    kind: RopeKind
    rotary_dim: int
    theta: float
    factor: float = 1.0
    original_positions: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    sections: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Softmax attention: `heads` query heads share `kv_heads` key/value heads, in order."""

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys, before the rotary embedding."""
    output_gate: bool = False
    """The query projection also gives a gate; the output is multiplied by its sigmoid."""
    bias: bool = False
    """Query, key, value and output projections have biases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNetConfig:
    """Gated DeltaNet (arXiv 2412.06464): value head h reads key head `h // (value_heads // key_heads)`."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def key_width(self) -> int:
        """Elements of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Elements of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Channels of the causal convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Routed experts of `intermediate` units, `top_k` a token, and the always active shared expert (0 units: there is none)."""

    num_experts: int
    top_k: int
    intermediate: int
    normalise: bool
    """The chosen experts' weights are divided by their sum."""
    shared_intermediate: int = 0

    @property
    def alike(self) -> bool:
        """The shared expert has the size of a routed one, so that kernels may run it as one more of them."""
        return self.shared_intermediate == self.intermediate


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """One layer: how it mixes tokens, its attention window (None: all), and whether its MLP is routed (`sparse`)."""

    kind: LayerKind
    sparse: bool
    window: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyConfig:
    """What the configuration of every family says, whatever its model computes."""

    architecture: str
    eos_token_ids: tuple[int, ...] = ()
    vision: VisionConfig | None = None
    """The tower, in a model that takes images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(FamilyConfig):
    """A decoder: everything of config.json that changes what is computed, and what the runtime must know besides."""

    family: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    attention: AttentionConfig
    delta: DeltaNetConfig | None = None
    moe: MoeConfig | None = None
    rope: RopeConfig
    norm_eps: float
    zero_centered: bool = False
    """Norm weights are stored minus one (the gated norm's are not)."""
    tied: bool
    """The head's weights are the embedding's."""
    max_positions: int
    split: int = 1
    """Ranks that heads and units of dense MLPs are divided among (see `model.share`); sizes here are the whole model's."""
    owners: int = 1
    """Ranks that sequences are divided among: each mixes tokens of its own alone, and keeps what these leave."""

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with routed experts."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.sparse)
