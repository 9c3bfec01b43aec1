"""Layers find their parts quickly, and always find those that torch has."""

from __future__ import annotations

import copy

import torch
from torch import nn

from model.layers.module import StepModule


class Layer(StepModule):
    def __init__(self) -> None:
        super().__init__()
        self.gate = None
        self.weight = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.inner = nn.Linear(2, 2)


def check(layer: Layer) -> None:
    assert vars(layer)["weight"] is layer.weight is layer._parameters["weight"]
    assert vars(layer)["inner"] is layer.inner is layer._modules["inner"]


def test_parts_are_plain_attributes_and_stay_torchs() -> None:
    layer = Layer()
    check(layer)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "inner.weight", "inner.bias"]
    assert set(layer.state_dict()) == {"weight", "inner.weight", "inner.bias"}


def test_new_parts_take_the_place_of_old_ones() -> None:
    layer = Layer()
    layer.weight = nn.Parameter(torch.ones(4), requires_grad=False)
    layer.inner = nn.Linear(3, 3)
    layer.gate = nn.Linear(1, 1)  # type: ignore[assignment]
    check(layer)
    assert layer.weight.shape == (4,)
    assert layer.inner.in_features == 3
    assert layer.gate is layer._modules["gate"]
    layer.gate = None
    assert layer.gate is None


def test_parameters_that_torch_changes_are_followed() -> None:
    layer = Layer().to(torch.float64)
    check(layer)
    assert layer.weight.dtype == torch.float64
    moved = Layer().to_empty(device="meta")
    check(moved)
    assert moved.weight.is_meta
    check(copy.deepcopy(layer))
