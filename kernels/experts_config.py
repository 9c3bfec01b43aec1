"""Configurations of the expert kernels as data: tile sizes, and which form runs; made by tuning, or from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Form = Literal["paired", "grouped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One kernel's tile: rows, outputs and depth of a program, its warps, and how many loads it keeps in flight.

    `swap` makes the weights the first operand of the matrix product (64 outputs by 16 rows use Hopper's widest instruction, 16 rows
    by 64 outputs do not). `descriptors` reads the weights through the tensor memory accelerator. When paired, `block_m` is the
    number of choices whose weights down reads at once; gate/up has no use for it.
    `persistent` programs a multiprocessor take tiles in turn (`kernels.experts_persistent`); 0: each tile has its own.
    """

    block_m: int = 16
    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 3
    swap: bool = False
    descriptors: bool = False
    persistent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """How one shape's experts run. `pdl` lets a kernel start while the one before it ends (programmatic dependent launch)."""

    form: Form
    gate_up: Tile
    down: Tile
    pdl: bool = False

    def __post_init__(self) -> None:
        if self.form == "grouped" and self.gate_up.block_m != self.down.block_m:
            raise ValueError(f"one grouping serves both kernels: {self.gate_up.block_m} rows a block and {self.down.block_m}")

    def plain(self) -> dict[str, Any]:
        """As nested dicts of plain values, for a file."""
        return asdict(self)

    @property
    def block_rows(self) -> int:
        """Rows of a block of the grouping that serves both kernels; 0 where nothing is grouped."""
        return self.gate_up.block_m if self.form == "grouped" else 0


def experts_config(plain: Mapping[str, Any]) -> ExpertsConfig:
    """The configuration that `plain()` gave. Raises TypeError for a field that does not exist, or ValueError for a wrong form."""
    if plain["form"] not in ("paired", "grouped"):
        raise ValueError(f"form {plain['form']!r} is neither paired nor grouped")
    fields = {**plain, "gate_up": Tile(**plain["gate_up"]), "down": Tile(**plain["down"])}
    return ExpertsConfig(**fields)


PAIRED_ROWS = 4
"""Up to this many rows most chosen experts differ from each other, and grouping would cost more than it saves."""


def default_config(rows: int, top_k: int, held: int) -> ExpertsConfig:
    """A configuration that is good for most shapes, from the number of rows an expert gets when all `held` are hit alike."""
    if rows <= PAIRED_ROWS:
        return ExpertsConfig(
            form="paired",
            gate_up=Tile(block_n=4, block_k=512, warps=4, stages=3),
            down=Tile(block_m=4, block_n=4, block_k=256, warps=4, stages=1),
        )
    share = rows * top_k / max(held, 1)
    if share <= 12:
        return _grouped(Tile(block_m=16, block_n=32, block_k=128, stages=4), Tile(block_m=16, block_n=64, block_k=128, stages=4))
    if share <= 24:
        return _grouped(Tile(block_m=16, block_n=64, block_k=128, stages=3), Tile(block_m=16, block_n=64, block_k=128, stages=4))
    if share <= 48:
        return _grouped(Tile(block_m=32, block_n=64, block_k=128, stages=3), Tile(block_m=32, block_n=64, block_k=128, stages=4))
    if share <= 192:
        return _grouped(Tile(block_m=64, block_n=64, block_k=64, stages=4), Tile(block_m=64, block_n=128, block_k=64, stages=4))
    return _grouped(
        Tile(block_m=128, block_n=128, block_k=64, warps=8, stages=3), Tile(block_m=128, block_n=256, block_k=64, warps=8, stages=3)
    )


def _grouped(gate_up: Tile, down: Tile) -> ExpertsConfig:
    return ExpertsConfig(form="grouped", gate_up=gate_up, down=down)


def experts_shape(hidden: int, units: int, held: int, top_k: int, dtype: str) -> dict[str, int | str]:
    """The key of a tuning table's entries for these kernels (kernel name `experts`); dtype as `bfloat16`."""
    return {"hidden": hidden, "units": units, "held": held, "top_k": top_k, "dtype": dtype}
