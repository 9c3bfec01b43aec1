"""Every family's folder, in every variant of its layout, loads whole: equal to its weight map applied tensor by tensor."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from model.decoder import Decoder
from model.loader import load_model
from model.parallel import Parallel
from tests.support.batches import Part, Ranks
from tests.support.checkpoints import CASES, hf_logits, make_checkpoint, prompt
from tests.support.weights import load_rank


def load(path: Path, rank: int, world: int, load_format: str = "auto") -> Decoder:
    loaded = load_model(path, Parallel(rank, world), dtype=torch.float32, device="cpu", load_format=load_format)  # type: ignore[arg-type]
    return loaded.model


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, variant = request.param
    return make_checkpoint(family, variant, tmp_path_factory.mktemp(f"{family}-{variant}"))


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 4), (3, 4)])
def test_every_parameter_is_what_the_map_says(folder: Path, rank: int, world: int) -> None:
    ours, expected = load(folder, rank, world), load_rank(folder, rank, world)
    parameters = dict(ours.named_parameters())
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameters.pop(name), parameter), name
    assert not parameters


def test_dummy_weights_give_finite_logits_that_depend_on_the_prompt(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    alone = Ranks(tmp_path, load=lambda path, rank, world: load(path, rank, world, "dummy"))
    logits = alone.logits(Part(0, prompt(9)), Part(1, prompt(5, seed=1)))
    assert bool(logits.isfinite().all())
    assert logits.std(0).min() > 0
    several = Ranks(tmp_path, 3, load=lambda path, rank, world: load(path, rank, world, "dummy"))
    again = several.logits(Part(0, prompt(9)), Part(1, prompt(5, seed=1)))
    torch.testing.assert_close(again, logits, rtol=0, atol=1e-4 * float(logits.abs().max()))


def test_loaded_ranks_compute_what_transformers_computes(tmp_path: Path) -> None:
    path = make_checkpoint("mixtral", "plain", tmp_path)
    expected = hf_logits(path, prompt(20))
    logits = Ranks(path, 3, load=load).logits(Part(2, prompt(20)))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
