"""Linear layers of few rows: their formula, and how the GPU kernels for it are configured, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch.nn import functional

Way = Literal["rows", "tiles", "library"]

MOST_ROWS = 128
"""Most rows that the kernels take; more are the library's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewRowsConfig:
    """How a linear layer of one shape and number of rows runs.

    `rows`: a program holds `block_n` whole rows of the weight in registers and goes over the rows of x, without tensor cores.
    `tiles`: with tensor cores, in steps of `block_k`; `splits` programs share the depth, and the last of them adds the sums. A
    program of one step holds its weights before it waits for x, others have them fetched to the L2 cache. Of 16-bit values, a tile
    has 64 or more columns, which are the matrix instruction's rows; or 64 or more rows of x by `block_rows` (0: all rows); or more
    than one of `parts`: groups of warps that share the depth of a step, and use a smaller instruction. `library`: what torch calls.
    """

    way: Way
    block_n: int = 16
    block_k: int = 128
    block_rows: int = 0
    parts: int = 1
    splits: int = 1
    warps: int = 4
    stages: int = 3

    def plain(self) -> dict[str, Any]:
        """As a dict of plain values, for a file: what differs from the defaults."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}


def few_rows_config(plain: Mapping[str, Any]) -> FewRowsConfig:
    """The configuration that `plain()` gave. Raises TypeError for a field that does not exist, ValueError for an unknown way."""
    if plain["way"] not in get_args(Way):
        raise ValueError(f"way {plain['way']!r} is none of {', '.join(get_args(Way))}")
    return FewRowsConfig(**plain)


def default_config(rows: int, depth: int) -> FewRowsConfig:
    """A configuration that is good for most shapes: more rows are better left to the library than to a guess."""
    if rows <= 2 and depth <= 4096:
        return FewRowsConfig(way="rows", block_n=4)
    return FewRowsConfig(way="library")


def few_rows_shape(depth: int, columns: int, dtype: str) -> dict[str, int | str]:
    """The key of a tuning table's entries for a weight `[columns, depth]` (kernel name `few_rows`); dtype as `bfloat16`."""
    return {"depth": depth, "columns": columns, "dtype": dtype}


def few_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x [T, K] @ weight [N, K]^T + bias [N]` -> `[T, N]`: sums in float32, rounded once to x's dtype."""
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
