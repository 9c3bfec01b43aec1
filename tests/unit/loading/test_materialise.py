"""The loader's core on a hand-made model: each rank's parameters against slices of the tensors that were saved."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from toy_moe import HIDDEN, INNER, VOCAB, Toy, tensors, weight_map

from model.errors import CheckpointError, ModelError, UnsupportedModel
from model.folder import read_manifest
from model.loading.checks import check_manifest
from model.loading.materialise import materialise, release, weight_bytes
from model.loading.sources import FileSource
from model.parallel import Parallel
from model.pieces import Piece, WeightMap

WORLDS = [(10, 4), (3, 5), (8, 2), (5, 1), (7, 3)]


def load(
    folder: Path, experts: int, parallel: Parallel, *, fused: bool, dtype: torch.dtype = torch.bfloat16, threads: int = 4
) -> Toy:
    module, pieces = Toy(experts, parallel, dtype), weight_map(experts, parallel, fused=fused)
    manifest = read_manifest(folder)
    check_manifest(pieces, manifest)
    steps: list[int] = []
    with FileSource(folder, manifest) as source:
        written = materialise(module, pieces, source, device=torch.device("cpu"), threads=threads, advance=steps.append)
    assert sum(steps) == written <= weight_bytes(module, pieces)
    return module


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("experts", "world"), WORLDS)
def test_the_ranks_together_hold_the_checkpoint_bit_for_bit(tmp_path: Path, experts: int, world: int, fused: bool) -> None:
    saved = tensors(experts, fused=fused)
    save_file(saved, tmp_path / "model.safetensors")
    ranks = [load(tmp_path, experts, Parallel(rank, world), fused=fused) for rank in range(world)]
    if fused:
        gate_up, down = saved["experts.gate_up"].transpose(1, 2), saved["experts.down"].transpose(1, 2)
    else:
        pairs = [(saved[f"experts.{e}.gate"], saved[f"experts.{e}.up"]) for e in range(experts)]
        gate_up = torch.stack([torch.cat(pair) for pair in pairs])
        down = torch.stack([saved[f"experts.{e}.down"] for e in range(experts)])
    assert torch.equal(torch.cat([module.gate_up for module in ranks]), gate_up)
    assert torch.equal(torch.cat([module.down for module in ranks]), down)
    shards = torch.cat([module.embed for module in ranks])
    assert torch.equal(shards[:VOCAB], saved["embed"])
    assert not shards[VOCAB:].any()
    assert shards.shape[0] == world * -(-VOCAB // world)
    for module in ranks:
        assert torch.equal(module.norm.weight, saved["norm"])
        assert module.head is module.embed
        assert module.down.stride()[-1] != 1 or module.down.numel() == 0
        assert all(not parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("threads", [1, 7])
def test_the_number_of_threads_changes_nothing(tmp_path: Path, threads: int) -> None:
    save_file(tensors(9, fused=False), tmp_path / "model.safetensors")
    one = load(tmp_path, 9, Parallel(0, 2), fused=False)
    other = load(tmp_path, 9, Parallel(0, 2), fused=False, threads=threads)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_are_converted_to_the_parameters_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = tensors(2, fused=False)
    save_file(saved, tmp_path / "model.safetensors")
    module = load(tmp_path, 2, Parallel(0, 1), fused=False, dtype=dtype)
    assert module.embed.dtype == dtype
    assert torch.equal(module.embed, saved["embed"].to(dtype))
    assert module.norm.weight.dtype == torch.float32


def saved_with(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    saved: dict[str, torch.Tensor | None] = {**tensors(4, fused=False), **changes}
    save_file({name: tensor for name, tensor in saved.items() if tensor is not None}, folder / "model.safetensors")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"experts.3.up": None, "norm": None}, CheckpointError, r"2 tensors are missing: experts\.3\.up, norm"),
        ({"experts.9.up": torch.ones(1)}, CheckpointError, r"does not use: experts\.9\.up"),
        (
            {"embed": torch.ones(VOCAB + 1, HIDDEN)},
            CheckpointError,
            rf"embed is \[{VOCAB + 1}, {HIDDEN}\], not \[{VOCAB}, {HIDDEN}\]",
        ),
        ({"norm": torch.ones(HIDDEN, dtype=torch.int32)}, UnsupportedModel, "norm is I32"),
    ],
)
def test_wrong_folders_are_refused_by_name_on_every_rank(
    tmp_path: Path, rank: int, changes: dict[str, torch.Tensor | None], error: type[Exception], match: str
) -> None:
    saved_with(tmp_path, changes)
    with pytest.raises(error, match=match):
        load(tmp_path, 4, Parallel(rank, 2), fused=False)


def test_a_long_list_of_names_is_bounded(tmp_path: Path) -> None:
    saved_with(tmp_path, {f"extra.{number:03}": torch.ones(1) for number in range(500)})
    with pytest.raises(CheckpointError, match=r"500 tensors .*extra\.019 and 480 more") as caught:
        load(tmp_path, 4, Parallel(0, 1), fused=False)
    assert len(str(caught.value)) < 500


def test_known_and_unused_tensors_are_left(tmp_path: Path) -> None:
    saved_with(tmp_path, {"mtp.layer": torch.full((2,), float("nan"))})
    load(tmp_path, 4, Parallel(0, 1), fused=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["embed", "experts.1.down"])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float, name: str) -> None:
    tensor = tensors(4, fused=False)[name]
    tensor[-1, -1] = value
    saved_with(tmp_path, {name: tensor})
    with pytest.raises(CheckpointError, match=rf"{name} holds values that are not finite in the checkpoint"):
        load(tmp_path, 4, Parallel(0, 1), fused=False)


def test_overflow_on_conversion_is_refused(tmp_path: Path) -> None:
    saved_with(tmp_path, {"embed": torch.full((VOCAB, HIDDEN), 1e6)})
    with pytest.raises(CheckpointError, match=r"embed .* once converted from torch\.float32 to torch\.float16"):
        load(tmp_path, 4, Parallel(0, 1), fused=False, dtype=torch.float16)


class Ones:
    """A source of ones that counts how many reads run at once."""

    def __init__(self) -> None:
        self.active = self.most = 0
        self.lock = threading.Lock()

    def read(self, piece: Piece) -> torch.Tensor:
        with self.lock:
            self.active += 1
            self.most = max(self.most, self.active)
        result = torch.ones(piece.shape)[piece.source]
        with self.lock:
            self.active -= 1
        return result


def fill(pieces: WeightMap, module: nn.Module | None = None, source: Ones | None = None, threads: int = 2) -> nn.Module:
    module = module or Toy(4, Parallel(0, 1), torch.float32)
    materialise(module, pieces, source or Ones(), device=torch.device("cpu"), threads=threads)
    return module


def with_piece(name: str, *pieces: Piece) -> WeightMap:
    whole = weight_map(4, Parallel(0, 1), fused=False)
    return replace(whole, pieces={**whole.pieces, name: pieces})


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        (with_piece("norm.weight", Piece(name="norm", shape=(1,))), r"norm gives \(1,\), its target in norm\.weight is \(6,\)"),
        (with_piece("other", Piece(name="o", shape=(1,))), "without a parameter: other"),
        (with_piece("gate_up", Piece(name="g", shape=(2 * INNER, HIDDEN), target=(1,))), "pieces of gate_up leave gaps: g"),
        (with_piece("norm.weight", *[Piece(name="norm", shape=(HIDDEN,))] * 2), r"pieces of norm\.weight meet"),
    ],
)
def test_maps_that_do_not_fit_the_module_are_refused(pieces: WeightMap, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        fill(pieces)


def test_pieces_in_flight_are_bounded() -> None:
    source = Ones()
    fill(weight_map(4, Parallel(0, 1), fused=False), source=source, threads=3)
    assert source.most <= 3
    assert source.active == 0


def test_a_tensor_left_without_values_is_refused() -> None:
    module = Toy(4, Parallel(0, 1), torch.float32)
    module.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(ModelError, match="no values: table"):
        fill(weight_map(4, Parallel(0, 1), fused=False), module)


def test_buffers_may_have_pieces() -> None:
    module = Toy(4, Parallel(0, 1), torch.float32)
    module.register_buffer("bias", torch.empty(3, device="meta"))
    fill(with_piece("bias", Piece(name="router.bias", shape=(3,))), module)
    assert torch.equal(module.get_buffer("bias"), torch.ones(3))
    assert not isinstance(module.get_buffer("bias"), nn.Parameter)


def test_release_drops_newest_first_and_keeps_the_shapes() -> None:
    module = fill(weight_map(4, Parallel(0, 1), fused=False))
    shapes = {name: parameter.shape for name, parameter in module.named_parameters(remove_duplicate=False)}
    gone: list[str] = []
    for name, parameter in module.named_parameters():
        weakref.finalize(parameter, gone.append, name)
    del parameter
    gc.disable()
    try:
        release(module)
    finally:
        gc.enable()
    assert sorted(gone) == sorted(shapes.keys() - {"head"})
    assert gone.index("zero_norm.weight") < gone.index("norm.weight") < gone.index("gate_up")
    assert all(parameter.is_meta for parameter in module.parameters())
    assert {name: parameter.shape for name, parameter in module.named_parameters(remove_duplicate=False)} == shapes
