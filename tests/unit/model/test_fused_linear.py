"""Which linear layers of a decode step run as a kernel, and that it gives what the layer gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.few_rows import MOST_ROWS, few_rows_shape
from model.layers.linear import Linear

DEPTH, COLUMNS = 64, 40


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that kernels were launched with."""
    from model.layers import fused

    seen: list[Any] = []

    def launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any, *rest: Any, **options: Any) -> Any:
        seen.append(config)
        return launched(x, weight, bias, config, *rest, **options)

    launched = fused.linear_rows
    monkeypatch.setattr(fused, "linear_rows", launch)
    return seen


def operators() -> Any:
    from kernels.tuning import Entry, Tuning, TuningTable
    from model.layers.fused import FusedOperators

    tiles = {"way": "tiles", "block_k": 32, "parts": 2, "splits": 2}
    entry = Entry("few_rows", few_rows_shape(DEPTH, COLUMNS, "float16"), (1, 8, 128), ({"way": "rows"}, tiles, {"way": "library"}))
    return FusedOperators(torch.device("cpu"), Tuning(TuningTable("none", (entry,)), lambda message: None), pdl=False)


def layer(*, row_major: bool = True, bias: bool = True) -> Linear:
    made = Linear(DEPTH, COLUMNS, bias=bias, dtype=torch.float16, device=torch.device("cpu"), row_major=row_major)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return made


def step(decode_only: bool = True) -> Any:
    return SimpleNamespace(batch=SimpleNamespace(decode_only=decode_only))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("rows", "way"), [(1, "rows"), (2, "tiles"), (8, "tiles"), (9, None), (MOST_ROWS + 1, None)])
def test_the_table_says_which_way(calls: list[Any], rows: int, way: str | None, bias: bool) -> None:
    linear, x = layer(bias=bias), torch.randn(rows, DEPTH, generator=torch.Generator().manual_seed(2)).half()
    got = operators().linear(linear, x, step())
    assert [config.way for config in calls] == ([] if way is None else [way])
    torch.testing.assert_close(got.double(), linear.double()(x.double()), rtol=1e-3, atol=1e-2)


def test_other_steps_layouts_and_formats_go_the_layers_own_way(calls: list[Any]) -> None:
    class Scaled(torch.nn.Module):
        shape = torch.Size((COLUMNS, DEPTH))

        def linear(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :COLUMNS] * 3

    x = torch.randn(1, DEPTH).half()
    other = layer(bias=False)
    other.weight = Scaled()
    assert torch.equal(operators().linear(other, x, step()), x[:, :COLUMNS] * 3)
    for linear, when in ((layer(row_major=False), step()), (layer(), step(decode_only=False))):
        assert torch.equal(operators().linear(linear, x, when), linear(x))
    assert calls == []
