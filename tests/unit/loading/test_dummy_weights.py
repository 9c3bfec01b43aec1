"""Dummy weights: the same numbers for the same tensor whatever the ranks, and near zero but for norms."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from toy_moe import VOCAB, Toy, weight_map

from model.loading.dummy import fill_norms
from model.loading.materialise import materialise
from model.loading.sources import DUMMY_RANGE, DummySource
from model.parallel import Parallel
from model.pieces import Index, Piece

CPU = torch.device("cpu")


def dummy(experts: int, parallel: Parallel, *, fused: bool = False, seed: int = 0) -> Toy:
    module = Toy(experts, parallel, torch.float32)
    pieces = weight_map(experts, parallel, fused=fused)
    materialise(module, pieces, DummySource(seed, CPU), device=CPU, threads=1, fill=fill_norms(module))
    return module


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("experts", "world"), [(10, 4), (3, 5), (8, 3)])
def test_a_share_is_the_same_in_every_world(experts: int, world: int, fused: bool) -> None:
    alone = dummy(experts, Parallel(0, 1), fused=fused)
    ranks = [dummy(experts, Parallel(rank, world), fused=fused) for rank in range(world)]
    assert torch.equal(torch.cat([module.gate_up for module in ranks]), alone.gate_up)
    assert torch.equal(torch.cat([module.down for module in ranks]), alone.down)
    assert torch.equal(torch.cat([module.embed for module in ranks])[:VOCAB], alone.embed)


def test_norms_are_neutral_and_the_rest_is_small() -> None:
    module = dummy(6, Parallel(0, 1))
    assert torch.equal(module.norm.weight, torch.ones(6))
    assert torch.equal(module.zero_norm.weight, torch.zeros(6))
    for tensor in (module.embed, module.gate_up, module.down):
        assert tensor.abs().max() <= DUMMY_RANGE
        assert tensor.unique().numel() > 0.99 * tensor.numel()


def test_values_are_uniform() -> None:
    values = DummySource(0, CPU).read(Piece(name="w", shape=(400, 500))).double() / DUMMY_RANGE
    assert values.min() >= -1
    assert values.max() < 1
    # Mean and variance of 200,000 draws from U(-1, 1), within five standard errors.
    assert abs(float(values.mean())) < 5 * (1 / 3 / 2e5) ** 0.5
    assert abs(float(values.var()) - 1 / 3) < 5 * (4 / 45 / 2e5) ** 0.5
    counts = torch.histc(values, bins=20, min=-1, max=1)
    assert float(((counts - 1e4) ** 2 / 1e4).sum()) < 55  # chi-square, 19 degrees of freedom, p < 3e-5
    assert abs(float((values[:, 1:] * values[:, :-1]).mean())) < 5 / 3 / 2e5**0.5
    assert abs(float((values[1:] * values[:-1]).mean())) < 5 / 3 / 2e5**0.5


@pytest.mark.parametrize(
    "index",
    [
        (),
        (slice(1, 3),),
        (2,),
        (slice(None), 1),
        (1, slice(0, 2), 0),
        (slice(0, 4, 2),),
        (slice(2, 2),),
        (slice(0, 1), slice(1, 3)),
    ],
)
def test_a_slice_is_read_without_the_rest(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = DummySource(3, CPU).read(Piece(name="w", shape=(4, 3, 5)))
    assert torch.equal(DummySource(3, CPU).read(Piece(name="w", shape=(4, 3, 5), source=index)), whole[index])
    monkeypatch.setattr("model.loading.sources._CHUNK", 4)
    assert torch.equal(DummySource(3, CPU).read(Piece(name="w", shape=(4, 3, 5), source=index)), whole[index])


def test_seed_and_name_matter() -> None:
    def read(seed: int, name: str) -> torch.Tensor:
        return DummySource(seed, CPU).read(Piece(name=name, shape=(64,)))

    assert torch.equal(read(1, "a"), read(1, "a"))
    assert not torch.equal(read(1, "a"), read(2, "a"))
    assert not torch.equal(read(1, "a"), read(1, "b"))


def test_values_do_not_depend_on_the_process() -> None:
    """Another process, with another hash seed, computes the same numbers."""
    code = (
        "import torch; from model.loading.sources import DummySource; from model.pieces import Piece;"
        "print(DummySource(5, torch.device('cpu')).read(Piece(name='w', shape=(3,))).tolist())"
    )
    result = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": "17"}, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(DummySource(5, CPU).read(Piece(name="w", shape=(3,))).tolist())


def test_scalars_are_read_too() -> None:
    assert DummySource(0, CPU).read(Piece(name="s", shape=())).shape == ()


def test_norms_are_told_by_their_class() -> None:
    class RMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    module = nn.ModuleDict({"input_layernorm": RMSNorm(), "normal": nn.Linear(3, 3)})
    fill = fill_norms(module)
    target, piece = torch.zeros(3), Piece(name="x", shape=(3,))
    assert fill("input_layernorm.weight", piece, target)
    assert torch.equal(target, torch.ones(3))
    assert not fill("normal.bias", piece, target)
