"""A shared expert behind the routed ones: the loader keeps what shares memory together, and gives every part its own values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from model.decoder import Decoder
from model.families.registry import build_model, weight_map
from model.folder import read_manifest
from model.layers.moe import Moe
from model.loader import load_model
from model.loading.materialise import materialise, release, weight_bytes
from model.loading.sources import DUMMY_RANGE, DummySource, FileSource
from model.parallel import Parallel
from model.pieces import WeightMap
from tests.support.checkpoints import make_checkpoint
from tests.support.weights import load_rank, placed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_5_moe", "heads", tmp_path_factory.mktemp("joined"))


def row_major(folder: Path, rank: int, world: int, *, device: str = "meta") -> tuple[Decoder, WeightMap]:
    """The module as a GPU has it, without values, and its map."""
    config, placement = placed(folder, world)
    parallel = Parallel(rank, world)
    manifest = {name: info.shape for name, info in read_manifest(folder).items()}
    module = build_model(config, parallel, placement, dtype=torch.float32, device=device, row_major=True)
    assert isinstance(module, Decoder)
    return module, weight_map(config, placement, parallel, manifest)


def moes(module: nn.Module) -> list[Moe]:
    found = [layer for layer in module.modules() if isinstance(layer, Moe)]
    assert found
    return found


def check_joined(module: Decoder) -> None:
    """What kernels see ends with what layers see as the shared expert, in the same memory."""
    for moe in moes(module):
        assert moe.shared is not None
        assert moe.shared_gate is not None
        many = (moe.router.weight, moe.gate_up, moe.down)
        one = (moe.shared_gate.weight, moe.shared.gate_up.weight, moe.shared.down.weight)
        for whole, first, last in zip(moe.weights(), many, one, strict=True):
            assert whole.is_contiguous()
            assert whole.shape[0] == first.shape[0] + 1
            assert whole.untyped_storage().data_ptr() == first.dequantize().untyped_storage().data_ptr()
            assert whole[-1].data_ptr() == last.dequantize().data_ptr()
            assert torch.equal(whole[:-1], first.dequantize())
            assert torch.equal(whole[-1].view(last.shape), last.dequantize())


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 3), (11, 12)])
def test_a_checkpoint_fills_joined_weights_as_it_fills_others(folder: Path, rank: int, world: int) -> None:
    module, pieces = row_major(folder, rank, world)
    with FileSource(folder, read_manifest(folder)) as source:
        written = materialise(module, pieces, source, device=CPU)
    parameters = dict(module.named_parameters())
    expected = dict(load_rank(folder, rank, world).named_parameters())
    assert list(parameters) == list(expected)
    for name, parameter in expected.items():
        assert torch.equal(parameters[name], parameter), name
    check_joined(module)
    padding = sum(row.nbytes for row in module.get_parameter("head.weight.weight") if not row.any())
    assert written == sum(parameter.nbytes for parameter in parameters.values()) - padding


def test_dummy_weights_are_those_of_weights_apart(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    apart = load_model(tmp_path, Parallel(1, 2), dtype=torch.float32, device="cpu", load_format="dummy", progress=False)
    module, _ = row_major(folder, 1, 2)
    config, placement = placed(folder, 2)
    materialise(module, weight_map(config, placement, Parallel(1, 2)), DummySource(0, CPU), device=CPU, threads=1)
    check_joined(module)
    for moe, other in zip(moes(module), moes(apart.model), strict=True):
        values = dict(other.named_parameters())
        for name, parameter in moe.named_parameters():
            assert torch.equal(parameter, values[name]), name
        for whole in moe.weights():
            assert whole.abs().max() <= 1.001 * DUMMY_RANGE
            assert whole[-1].std() == pytest.approx(DUMMY_RANGE / 3**0.5, rel=0.3)


def test_joined_weights_take_no_more_memory(folder: Path) -> None:
    module, pieces = row_major(folder, 1, 2)
    nbytes = sum(parameter.nbytes for parameter in module.parameters())
    assert weight_bytes(module, pieces) == nbytes
    with FileSource(folder, read_manifest(folder)) as source:
        materialise(module, pieces, source, device=CPU)
    storages = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes() for parameter in module.parameters()}
    assert sum(storages.values()) == nbytes
    shared = 3 * len(moes(module))
    assert len(storages) == len(list(module.parameters())) - shared


def test_released_weights_leave_no_view_of_them(folder: Path) -> None:
    module, pieces = row_major(folder, 0, 1)
    with FileSource(folder, read_manifest(folder)) as source:
        materialise(module, pieces, source, device=CPU)
    release(module)
    assert all(parameter.is_meta for parameter in module.parameters())
    for moe in moes(module):
        assert all(weight.is_meta for weight in moe.weights())
        large = [value for value in vars(moe).values() if isinstance(value, torch.Tensor)]
        assert not large


def test_a_module_built_with_its_memory_is_joined_too(folder: Path) -> None:
    module, _ = row_major(folder, 0, 1, device="cpu")
    for parameter in module.parameters():
        parameter.uniform_()
    check_joined(module)
