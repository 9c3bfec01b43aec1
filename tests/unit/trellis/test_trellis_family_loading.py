"""A Trellis folder through the runtime's loader: a rank's share, what is refused, dummy weights, and the plan's numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ep_runtime.config import Facts, RuntimeConfig
from ep_runtime.config import resolve as resolve_runtime
from ep_runtime.engine.footprint import memory_needs
from ep_runtime.engine.rank import choose_dtype, stored_dtype
from model.errors import CheckpointError
from model.loader import LoadedModel, load_model, prepare_model
from model.memory import DeviceMemory, plan_memory
from model.parallel import Parallel
from model.state.registry import StateRegistry
from model.trellis import save_checkpoint
from model.trellis.checkpoint import config_to_json
from tests.unit.trellis.trellis_cases import NANO, make

WEIGHTS = "model.safetensors"
RANKS = [(0, 1), (0, 2), (1, 2), (0, 4), (3, 4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(make(), tmp_path)
    return tmp_path


def load(path: Path, rank: int = 0, world: int = 1, **options: Any) -> LoadedModel:
    options = {"dtype": torch.float32, "device": "cpu", "progress": False} | options
    return load_model(path, Parallel(rank, world), **options)


def parameters(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}


@pytest.mark.parametrize(("rank", "world"), RANKS)
def test_a_rank_has_its_rows_of_the_bank_and_all_else(folder: Path, rank: int, world: int) -> None:
    held = parameters(load(folder, rank, world))
    tensors = {key: tensor for key, tensor in load_file(folder / WEIGHTS).items() if not key.startswith("aux_heads.")}
    assert held.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.equal(held[key], tensor[rank::world] if key == "bank.values" else tensor), key


def test_auxiliary_heads_on_disk_are_left_there(folder: Path, tmp_path: Path) -> None:
    save_checkpoint(make(), tmp_path / "serving", aux=False)
    assert any(key.startswith("aux_heads.") for key in load_file(folder / WEIGHTS))
    with_heads, without = parameters(load(folder)), parameters(load(tmp_path / "serving"))
    assert with_heads.keys() == without.keys()
    assert all(torch.equal(with_heads[key], without[key]) for key in without)


WRONG: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "missing": ({"core.layers.3.mixer.w_g": None}, r"1 tensors are missing: core\.layers\.3\.mixer\.w_g"),
    "surplus": ({"core.layers.6.extra": torch.ones(1)}, r"does not use: core\.layers\.6\.extra"),
    "shape": ({"bank.values": torch.ones(255, 32)}, r"bank\.values is \[255, 32\], not \[256, 32\]"),
    "not finite": ({"engine.routers.2.bias": torch.full((1,), torch.nan)}, r"engine\.routers\.2\.bias holds values that are not"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 2)])
def test_wrong_tensors_are_named_on_every_rank(folder: Path, name: str, rank: int, world: int) -> None:
    changes, told = WRONG[name]
    tensors = {key: tensor for key, tensor in (load_file(folder / WEIGHTS) | changes).items() if tensor is not None}
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=told):
        load(folder, rank, world)


def test_bank_rows_are_checked_by_the_rank_that_has_them(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["bank.values"][7, 3] = torch.inf
    save_file(tensors, folder / WEIGHTS)
    load(folder, 0, 2)
    with pytest.raises(CheckpointError, match=r"bank\.values holds values that are not finite"):
        load(folder, 1, 2)


@pytest.mark.parametrize("world", [2, 4])
def test_dummy_weights_need_a_config_alone(tmp_path: Path, world: int) -> None:
    """Gains are one, the rest is small; rows of the bank are the same whichever rank has them."""
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(NANO)))
    alone = parameters(load(tmp_path, load_format="dummy"))
    ranks = [parameters(load(tmp_path, rank, world, load_format="dummy")) for rank in range(world)]
    for rank, held in enumerate(ranks):
        for key, tensor in held.items():
            assert torch.equal(tensor, alone[key][rank::world] if key == "bank.values" else alone[key]), key
    gains = [key for key in alone if key.endswith(".gain") or "specialisation.gains" in key]
    assert len(gains) == 2 * 10 + 4 * 6 + 1 + 7 + 2
    assert all(bool((alone[key] == 1).all()) == (key in gains) for key in alone)
    assert all(float(alone[key].abs().max()) <= 1.001e-3 for key in alone if key not in gains)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 4)])
def test_the_plans_exact_lines_are_what_is_allocated(folder: Path, rank: int, world: int, dtype: str) -> None:
    kind = getattr(torch, dtype)
    prepared = prepare_model(folder, Parallel(rank, world), dtype=kind, device="cpu")
    config = resolve_runtime(
        RuntimeConfig(model=str(folder), device="cpu", max_num_seqs=3, num_blocks=20),
        Facts(gpus=0, cores=1, world=world, local_world=world),
    )
    needs = memory_needs(config, prepared, kind, prepared.spec.max_positions)
    plan = plan_memory(prepared.spec, needs, DeviceMemory("cpu", 4 << 30, 0), 1.0)
    lines = {what.split(",")[0]: size for what, size in plan.lines}
    loaded = prepared.load(progress=False)
    assert lines["weights"] == loaded.report.nbytes == sum(tensor.nbytes for tensor in parameters(loaded).values())
    state = StateRegistry(
        prepared.spec, max_slots=plan.max_slots, num_blocks=plan.num_blocks, block_size=16, dtype=kind, device="cpu"
    )
    assert lines["KV cache"] == state.paged.nbytes
    assert lines["recurrent state"] == state.recurrents.nbytes
    assert lines["scratch"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_runtime_computes_in_the_dtype_that_is_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    """A config.json of layout 1 names none. What is stored in no dtype of weights is float32, as without weights."""
    save_checkpoint(make(dtype=dtype), tmp_path)
    config = config_to_json(NANO)
    expected = torch.float32 if dtype == torch.float64 else dtype
    assert choose_dtype("auto", config, stored_dtype(tmp_path)) == expected
    assert choose_dtype("float16", config, stored_dtype(tmp_path)) == torch.float16
    (tmp_path / WEIGHTS).unlink()
    assert choose_dtype("auto", config, stored_dtype(tmp_path)) == torch.float32


def test_a_config_of_another_bank_asks_for_other_tensors(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config_to_json(replace(NANO, bank_value_dim=16))))
    with pytest.raises(CheckpointError, match=r"bank\.values is \[256, 32\], not \[256, 16\]"):
        load(folder)
