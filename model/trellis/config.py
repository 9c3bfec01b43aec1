"""The architecture of a Trellis model: everything that decides which parameters exist and how large they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from model.trellis.errors import ModelConfigError

GDN, GLOBAL, SLIDING = "gdn", "global", "sliding"
QK_NORMS = ("sliding", "all", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class AuxHeadSpec:
    """Widths and label vocabularies of the four training-only heads. Three are `width` wide; `dfg` scores pairs at `dfg_width`."""

    width: int = 768
    boundary_labels: int = 4
    ast_labels: int = 1024
    type_labels: int = 4096
    dfg_width: int = 192
    dfg_labels: int = 2

    def token_heads(self) -> tuple[tuple[str, int], ...]:
        """(name, labels) of the heads that label single tokens."""
        return (("boundary", self.boundary_labels), ("ast", self.ast_labels), ("type", self.type_labels))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrellisConfig:
    """Sizes of a Trellis model. Raises ModelConfigError for sizes that do not fit each other.

    `rho` are the capacities of loops 1 to K_max as decimal strings, so that token counts are exact. `context` is the training
    length and the capacity of the global caches where a call gives none. `aux` is None for a model without auxiliary heads.
    `qk_norm`, `bank_read_norm` and `swa_gate_inside` choose between two readings of the parameter table, see `model.trellis.audit`.
    """

    d_model: int = 768
    vocab_size: int = 49_152
    rho: tuple[str, ...] = ("1.0", "1.0", "0.5", "0.25")
    prelude: tuple[str, ...] = (GDN, GLOBAL)
    core: tuple[str, ...] = (GDN, GDN, GDN, SLIDING, GDN, GDN)
    coda: tuple[str, ...] = (GDN, GLOBAL)
    heads: int = 12
    kv_heads: int = 2
    head_dim: int = 64
    window: int = 4096
    rope_theta: float = 10_000.0
    mlp_dim: int = 2048
    gdn_heads: int = 12
    gdn_key_dim: int = 64
    gdn_value_dim: int = 96
    gdn_conv: int = 4
    lora_rank: int = 16
    bank_sub_keys: int = 512
    bank_value_dim: int = 256
    bank_key_dim: int = 192
    bank_heads: int = 2
    bank_top_k: int = 32
    bank_read_norm: bool = False
    qk_norm: str = "sliding"
    swa_gate_inside: bool = True
    aux: AuxHeadSpec | None = field(default_factory=AuxHeadSpec)
    context: int = 4096
    eps: float = 1e-6
    gdn_eps: float = 1e-5

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_layers(self)
        _check_schedule(self.rho)

    @property
    def k_max(self) -> int:
        """Loops that the core may run."""
        return len(self.rho)

    @property
    def layers(self) -> tuple[str, ...]:
        """Kinds of the unique layers, in order."""
        return self.prelude + self.core + self.coda

    @property
    def capacities(self) -> tuple[Fraction, ...]:
        """Exact capacities of loops 1 to K_max."""
        return tuple(Fraction(rho) for rho in self.rho)

    @property
    def bank_slots(self) -> int:
        """Rows of the value table."""
        return self.bank_sub_keys**2

    @property
    def gdn_channels(self) -> int:
        """Channels of a GDN layer's convolution: queries, keys, values."""
        return self.gdn_heads * (2 * self.gdn_key_dim + self.gdn_value_dim)


BANK_READ_POINTS = 2
"""After the prelude, and after the last executed loop."""


def _check_sizes(config: TrellisConfig) -> None:
    sizes = (
        "d_model", "vocab_size", "heads", "kv_heads", "head_dim", "window", "mlp_dim", "gdn_heads", "gdn_key_dim", "gdn_value_dim",
        "lora_rank", "bank_sub_keys", "bank_value_dim", "bank_key_dim", "bank_heads", "bank_top_k", "context",
    )  # fmt: skip
    for name in sizes:
        value = getattr(config, name)
        if type(value) is not int or value < 1:
            raise ModelConfigError(f"{name} = {value!r} is not a positive integer")
    if config.gdn_conv < 2:
        raise ModelConfigError(f"gdn_conv = {config.gdn_conv}: a convolution of less than two tokens keeps no state")
    if config.heads % config.kv_heads:
        raise ModelConfigError(f"heads = {config.heads} is not a multiple of kv_heads = {config.kv_heads}")
    if config.head_dim % 2:
        raise ModelConfigError(f"head_dim = {config.head_dim} is odd; rotary embedding turns pairs")
    if config.bank_top_k > config.bank_sub_keys:
        raise ModelConfigError(f"bank_top_k = {config.bank_top_k} is more than bank_sub_keys = {config.bank_sub_keys}")
    if config.qk_norm not in QK_NORMS:
        raise ModelConfigError(f"qk_norm = {config.qk_norm!r} is none of {', '.join(QK_NORMS)}")


def _check_layers(config: TrellisConfig) -> None:
    """Sliding layers belong to the core and global ones outside it: a global cache is written once a token, whatever K."""
    for part, kinds, allowed in (
        ("prelude", config.prelude, (GDN, GLOBAL)),
        ("core", config.core, (GDN, SLIDING)),
        ("coda", config.coda, (GDN, GLOBAL)),
    ):
        if not kinds or any(kind not in allowed for kind in kinds):
            raise ModelConfigError(f"{part} = {kinds!r}: layers there are one or more of {', '.join(allowed)}")


def _check_schedule(rho: tuple[str, ...]) -> None:
    if not rho:
        raise ModelConfigError("rho is empty; it has one capacity per loop")
    values = []
    for text in rho:
        try:
            values.append(Fraction(text))
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise ModelConfigError(f"rho holds {text!r}, which is not a number") from error
        if not isinstance(text, str) or not 0 < values[-1] <= 1:
            raise ModelConfigError(f"rho holds {text!r}; capacities are decimal strings in (0, 1]")
    if values[0] != 1:
        raise ModelConfigError(f"rho starts with {rho[0]}; every token runs loop 1")
