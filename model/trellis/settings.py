"""Behaviour of a Trellis model that no parameter depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from model.trellis.config import TrellisConfig
from model.trellis.errors import ModelConfigError

LOWER_INDEX = "lower_index"
BOUNDARY_CLASSES = 4


class ReadoutMode(StrEnum):
    """What a loop's readout carries."""

    HIDDEN = "hidden"
    LOGITS = "logits"


class BankWeighting(StrEnum):
    """How scores of selected slots become weights: with the margin to the last one, which then weighs nothing, or plain."""

    MARGIN = "margin"
    SOFTMAX = "softmax"


class ShardMode(StrEnum):
    """How ranks that share the value table add up a read (see `model.trellis.bank_shards`)."""

    SUM = "sum"
    FIXED = "fixed"
    ROWS = "rows"


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSettings:
    """`nested`: a token dropped at one boundary stays dropped. `tie_break` names the one order of equal scores there is."""

    nested: bool = True
    tie_break: str = LOWER_INDEX

    def __post_init__(self) -> None:
        if self.tie_break != LOWER_INDEX:
            raise ModelConfigError(f"tie_break = {self.tie_break!r}; equal scores go by {LOWER_INDEX}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """Flags that change what a model computes, never which parameters it has.

    `boundary_bias` gives each boundary class a score bias as a key of the global layers. `batch_invariant` runs the sequences of a
    batch one by one, so that no bit depends on what shares it. `dropout` applies to embeddings in training mode alone.
    """

    readout_mode: str = ReadoutMode.HIDDEN
    router: RouterSettings = field(default_factory=RouterSettings)
    specialisation_enabled: bool = True
    bank_enabled: bool = True
    bank_force_zero_delta: bool = False
    bank_weighting: str = BankWeighting.MARGIN
    bank_shard_mode: str = ShardMode.SUM
    boundary_bias: tuple[float, ...] | None = None
    batch_invariant: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name, kind in (("readout_mode", ReadoutMode), ("bank_weighting", BankWeighting), ("bank_shard_mode", ShardMode)):
            if getattr(self, name) not in set(kind):
                raise ModelConfigError(f"{name} = {getattr(self, name)!r} is none of {', '.join(kind)}")
        if self.boundary_bias is not None and len(self.boundary_bias) != BOUNDARY_CLASSES:
            raise ModelConfigError(
                f"boundary_bias has {len(self.boundary_bias)} values, one for each of {BOUNDARY_CLASSES} classes"
            )
        if not 0 <= self.dropout < 1:
            raise ModelConfigError(f"dropout = {self.dropout} is not in [0, 1)")

    def check(self, config: TrellisConfig) -> None:
        """Raise ModelConfigError where a nested router would have to grow a selection."""
        rho = config.capacities
        if self.router.nested and any(later > earlier for earlier, later in pairwise(rho)):
            raise ModelConfigError(f"rho = {config.rho} grows; under nested selection capacities never do")
