"""The attention of decode steps in the interpreter against formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.paged_step_triton import StepConfig, attention_step, default_step_config
from tests.unit.kernels.step_cases import StepCase

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def run(case: StepCase, config: StepConfig | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs and caches; turns are zero again."""
    k_cache, v_cache = case.paged.k_cache.clone(), case.paged.v_cache.clone()
    turns = torch.zeros(len(case.paged.lengths) * case.kv_heads, dtype=torch.int32)
    arguments: dict[str, Any] = case.arguments(k_cache, v_cache)
    out = attention_step(**arguments, turns=turns, config=config)
    assert not turns.any()
    return out, k_cache, v_cache


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "half", "options"),
    [
        ([1], 3, 1, 16, 8, {}),
        ([63, 0, 65, 1], 4, 2, 16, 3, {"norm": None, "gated": True, "cached": (2,)}),
        ([130, 17, 33, 64], 9, 3, 16, 8, {"norm": "zero-centred", "window": 20, "cached": (1,)}),
        ([100, 65], 2, 2, 32, 4, {"window": 1}),
        ([33, 16], 16, 1, 64, 16, {"gated": True, "dtype": torch.float16}),
        ([49], 20, 1, 16, 8, {"norm": None}),
    ],
    ids=str,
)
def test_steps(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, half: int, options: dict[str, Any], splits: int
) -> None:
    """Idle rows give zeros, cached rows write nothing, and every other place of the caches stays as it is."""
    dtype = options.get("dtype", torch.float32)
    options = {name: value for name, value in options.items() if name != "dtype"}
    case = StepCase(lengths, heads, kv_heads, head_dim, half, dtype, **options)
    out, k_cache, v_cache = run(case, StepConfig(tile=16, warps=4, stages=2, splits=splits, alone=32))
    expected, k_after, v_after = case.expected()
    for row, length in enumerate(lengths):
        error = (out[row].double() - expected[row]).norm()
        assert float(error) <= TOLERANCE[dtype] * float(expected[row].norm()), f"row {row} of length {length}"
    torch.testing.assert_close(k_cache.double(), k_after, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(v_cache.double(), v_after)
    changed = (k_cache != case.paged.k_cache).flatten(2).any(2).flatten()
    assert set(changed.nonzero().flatten().tolist()) <= set(case.places.tolist())


def test_a_row_does_not_depend_on_the_others() -> None:
    """The same sequence with other neighbours in a batch of the same size."""
    first = StepCase([70, 5, 40], 4, 2, 16, 8, torch.float32)
    out, _, _ = run(first, None)
    arguments: dict[str, Any] = first.arguments(first.paged.k_cache.clone(), first.paged.v_cache.clone())
    order = torch.tensor([2, 0, 1])
    for name in ("projected", "cos", "sin", "places", "block_tables", "seq_lens"):
        arguments[name] = arguments[name].index_select(0, order)
    arguments["seq_lens"][2] = 0
    arguments["places"][2] = -1
    moved = attention_step(**arguments, turns=torch.zeros(6, dtype=torch.int32))
    assert torch.equal(moved[:2], out[[2, 0]])
    assert not moved[2].any()


def test_defaults() -> None:
    """More parts for fewer programs, none for batches that fill the chip."""
    assert default_step_config(1, 2, 128, 40960).splits > default_step_config(32, 2, 128, 40960).splits
    assert default_step_config(256, 2, 128, 1536).splits == 1
    assert default_step_config(1, 2, 128, 100).splits == 1


def test_wrong_shapes_are_refused() -> None:
    case = StepCase([5], 2, 1, 16, 8, torch.float32)
    arguments: dict[str, Any] = case.arguments(case.paged.k_cache, case.paged.v_cache)
    turns = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="both"):
        attention_step(**arguments | {"k_norm": None}, turns=turns)
    with pytest.raises(ValueError, match="turned"):
        attention_step(**arguments | {"projected": case.projected[:, :60]}, turns=turns)
    with pytest.raises(ValueError, match="turns"):
        attention_step(**arguments, turns=turns[:0])
    with pytest.raises(ValueError, match="over"):
        attention_step(**arguments | {"heads": 3, "k_cache": case.paged.k_cache[..., :12]}, turns=turns)
