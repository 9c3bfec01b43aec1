"""Linear layers of few rows, in Triton's interpreter, against float64: every way, ragged sizes, strided rows, shared sums."""

from __future__ import annotations

import pytest
import torch

from kernels.few_rows import MOST_ROWS, FewRowsConfig, default_config, few_rows, few_rows_config
from kernels.few_rows_triton import linear_rows

ROWS = FewRowsConfig(way="rows", block_n=4)
HELD = FewRowsConfig(way="tiles", block_n=16, block_k=128, parts=4)
STREAMED = FewRowsConfig(way="tiles", block_n=16, block_k=64, parts=2)
SHARED = FewRowsConfig(way="tiles", block_n=32, block_k=32, splits=3)
HELD_SHARED = FewRowsConfig(way="tiles", block_n=16, block_k=64, parts=2, splits=2)
SPARE = FewRowsConfig(way="tiles", block_n=16, block_k=64, splits=4)
ROW_TILES = FewRowsConfig(way="tiles", block_n=16, block_k=32, block_rows=16, splits=2)
CONFIGS = {
    "rows": ROWS,
    "held": HELD,
    "streamed": STREAMED,
    "shared": SHARED,
    "held, shared": HELD_SHARED,
    "spare splits": SPARE,
    "row tiles": ROW_TILES,
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 128, 48), (3, 100, 37), (9, 128, 5), (33, 104, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_formula(config: FewRowsConfig, rows: int, depth: int, columns: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, depth + 8, generator=draw).to(dtype)
    x, weight = wide[:, 8:], torch.randn(columns, depth, generator=draw).to(dtype)
    turns = torch.zeros(64, dtype=torch.int32)
    for bias in (None, torch.randn(columns, generator=draw).to(dtype)):
        got = linear_rows(x, weight, bias, config, turns)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert got.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 5e-4
        assert (got.double() - exact).norm() < tolerance * exact.norm()
        assert (few_rows(x, weight, bias).double() - exact).norm() < tolerance * exact.norm()
        assert not turns.any()


def test_no_rows_and_what_is_refused() -> None:
    weight, turns = torch.randn(32, 64), torch.zeros(64, dtype=torch.int32)
    assert linear_rows(torch.empty(0, 64), weight, None, ROWS, turns).shape == (0, 32)
    for x, w in (
        (torch.randn(MOST_ROWS + 1, 64), weight),
        (torch.randn(2, 60), weight),
        (torch.randn(64, 2).T, weight),
        (torch.randn(2, 64), torch.randn(64, 32).T),
    ):
        with pytest.raises(ValueError, match="rows"):
            linear_rows(x, w, None, ROWS, turns)


def test_configurations_as_data() -> None:
    for config in (*CONFIGS.values(), *(default_config(rows, 2048) for rows in (1, 2, 128))):
        assert few_rows_config(config.plain()) == config
    assert few_rows_config({"way": "library"}).plain() == {"way": "library"}
    with pytest.raises(ValueError, match="way"):
        few_rows_config({"way": "magic"})
    with pytest.raises(TypeError):
        few_rows_config({"way": "rows", "size": 1})
