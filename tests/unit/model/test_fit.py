"""Which heads the kernels take, and that a layer of other heads is planned for as torch runs it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.config import DeltaNetConfig
from model.fit import attention_fits, delta_fits
from model.scratch import StepSize, delta_bytes

SIZE = StepSize(rows=512, slots=8, scored=0, positions=1024, element=4, world=1, held=0, device="cuda", kernels=True, head=True)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "fits"),
    [(16, 16, True), (128, 32, True), (256, 16, True), (8, 16, False), (96, 16, False), (0, 16, False), (64, 24, False)],
)
def test_attention(head_dim: int, block_size: int, fits: bool) -> None:
    assert attention_fits(head_dim, block_size) is fits


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "fits"),
    [(64, 64, True), (128, 128, True), (128, 64, True), (16, 16, False), (32, 128, False), (128, 96, False)],
)
def test_delta(key_dim: int, value_dim: int, fits: bool) -> None:
    assert delta_fits(key_dim, value_dim) is fits
    shape = DeltaNetConfig(key_heads=2, value_heads=4, key_dim=key_dim, value_dim=value_dim, kernel=4)
    as_torch = delta_bytes(shape, replace(SIZE, kernels=False))
    assert (delta_bytes(shape, SIZE) == as_torch) is not fits
