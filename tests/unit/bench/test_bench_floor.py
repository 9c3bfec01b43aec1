"""The floor's bytes: counted again from the modules' tensors, published parameter counts, and small routings by hand."""

from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from ep_runtime.bench.configs import PUBLISHED, write_config
from ep_runtime.bench.floor import StepBytes, busier_hits, split, step_bytes, weight_bytes
from model.loader import PreparedModel, prepare_model
from model.parallel import ExpertPlacement, Parallel

BILLIONS = {"qwen3-30b-a3b": 30.53, "qwen3.5-35b-a3b": 34.66, "qwen3-next-80b-a3b": 79.67}


def prepared(name: str, folder: Path, world: int = 1, layers: int | None = None) -> PreparedModel:
    write_config(name, folder, layers)
    return prepare_model(folder, Parallel(0, world), dtype=torch.bfloat16, device="cpu", load_format="dummy")


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_have_the_published_number_of_parameters(name: str, tmp_path: Path) -> None:
    model = prepared(name, tmp_path)
    assert sum(tensor.numel() for tensor in model.module.parameters()) / 1e9 == pytest.approx(BILLIONS[name], abs=0.01)


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_reads_the_configurations_alike(name: str, tmp_path: Path) -> None:
    model = prepared(name, tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.vocab_size == model.spec.vocab_size
    assert theirs.num_experts_per_tok == model.spec.experts_per_token
    assert theirs.rope_parameters["rope_theta"] == model.config.rope.theta
    assert int(theirs.head_dim * theirs.rope_parameters.get("partial_rotary_factor", 1.0)) == model.config.rope.rotary_dim
    linear = sum(kind == "linear_attention" for kind in getattr(theirs, "layer_types", None) or [])
    assert len(model.spec.caches) == theirs.num_hidden_layers - linear


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", PUBLISHED)
def test_parts_of_the_weights_are_those_of_the_modules(name: str, world: int, tmp_path: Path) -> None:
    model = prepared(name, tmp_path, world, layers=4)
    sizes = {key: tensor.nbytes for key, tensor in model.module.named_parameters()}
    experts = sum(size for key, size in sizes.items() if key.endswith(("moe.gate_up.weight", "moe.down.weight")))
    parts = weight_bytes(model.config, model.parallel, model.placement, model.weight_bytes, "bfloat16")
    held = -(-model.spec.num_experts // world)
    assert parts.expert * held * 4 == experts
    assert parts.head == sizes["head.weight.weight"]
    assert parts.dense == sum(sizes.values()) - experts - sizes["head.weight.weight"] - sizes["embedding"]


def test_a_step_of_one_sequence_reads_its_experts_keys_and_states(tmp_path: Path) -> None:
    model = prepared("qwen3-next-80b-a3b", tmp_path, layers=4)
    parts = weight_bytes(model.config, model.parallel, model.placement, model.weight_bytes, "bfloat16")
    step = step_bytes(parts, model.spec, model.placement, "bfloat16", batch=1, context=100)
    assert step.experts == 4 * 10 * parts.expert
    assert step.cache == 100 * 2 * 2 * 256 * 2
    conv, matrix = (2 * 16 * 128 + 32 * 128) * 3 * 2, 32 * 128 * 128 * 4
    assert step.state == 2 * 3 * (conv + matrix)
    assert step.total == step.experts + parts.dense + parts.head + step.cache + step.state
    assert step.milliseconds(step.total * 1000.0) == pytest.approx(1.0)


def test_splitting_leaves_what_is_divided_already() -> None:
    step = StepBytes(experts=7, dense=8, head=3, cache=4, state=2)
    assert split(step, 2) == StepBytes(experts=7, dense=4, head=3, cache=2, state=1)


def test_expected_hits_of_the_busier_rank() -> None:
    one = ExpertPlacement.build(10, 1)
    assert busier_hits(one, 3, 1) == pytest.approx(3)
    assert busier_hits(one, 3, 2) == pytest.approx(3 + 3 * 0.7)
    two = ExpertPlacement.build(6, 2)
    pairs = list(combinations(range(6), 2))
    most = [max(sum(e < 3 for e in {*a, *b}), sum(e >= 3 for e in {*a, *b})) for a, b in product(pairs, pairs)]
    assert busier_hits(two, 2, 2) == pytest.approx(sum(most) / len(most), rel=0.05)
    assert busier_hits(two, 6, 1) == 3
