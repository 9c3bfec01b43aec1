"""Which layout `auto` picks, beside the cost model of the benchmarks; what a divided rank reads, beside what that model says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ep_runtime.bench.configs import PUBLISHED, write_config
from ep_runtime.bench.cost import Case, collectives, decode_step, rank_bytes
from ep_runtime.bench.cost_models import load_machine, model_costs
from ep_runtime.bench.floor import step_bytes, weight_bytes
from ep_runtime.engine.layout import LINKS, USUAL_CONTEXT, USUAL_SEQUENCES, Machine, choose_layout
from model.config import ModelConfig
from model.families.registry import resolve
from model.loader import prepare_model
from model.parallel import Parallel
from model.trellis.checkpoint import config_to_json
from model.trellis.presets import PRESETS
from tests.support.checkpoints import make_checkpoint, read_config

H200 = Machine(world=2, device="NVIDIA H200", one_host=True, dtype="bfloat16", max_num_seqs=256, max_model_len=4096)


def test_links_are_those_of_the_cost_model() -> None:
    links, machine = LINKS["NVIDIA H200"], load_machine("nvidia_h200")
    assert (links.memory, links.inside) == (machine.bandwidth, machine.links.inside)
    assert (links.sum_us, links.peer_us) == (machine.links.reduction, machine.links.peer)


@pytest.mark.parametrize("sequences", [1, USUAL_SEQUENCES])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", PUBLISHED)
def test_auto_picks_the_layout_whose_step_the_benchmarks_model_says_is_shorter(
    name: str, world: int, sequences: int, tmp_path: Path
) -> None:
    write_config(name, tmp_path)
    config = resolve(read_config(tmp_path))
    layout = choose_layout("auto", config, replace(H200, world=world, max_num_seqs=sequences))
    machine, model = load_machine("nvidia_h200"), model_costs(name)
    case = Case(batch=sequences, context=USUAL_CONTEXT, per_host=world)
    times = {name: decode_step(machine, model, replace(case, layout=name)).total for name in ("replicated", "tensor")}
    assert layout.name == min(times, key=lambda name: times[name])
    sums = collectives(model, "tensor", world) - collectives(model, "replicated", world)
    assert f"a decode step of {sequences} sequences of {USUAL_CONTEXT} positions" in layout.reason
    assert f"{sums} more sums over ranks" in layout.reason


def test_auto_takes_replicated_where_it_cannot_tell_and_says_why(tmp_path: Path) -> None:
    moe = resolve(read_config(make_checkpoint("mixtral", "plain", tmp_path / "mixtral")))
    found = {
        "one rank": choose_layout("auto", moe, replace(H200, world=1)),
        "measured on cpu": choose_layout("auto", moe, replace(H200, device="cpu")),
        "measured on several hosts": choose_layout("auto", moe, replace(H200, one_host=False)),
        "num_attention_heads is 6": choose_layout("auto", moe, replace(H200, world=4)),
        "not served for": choose_layout("auto", resolve(config_to_json(next(iter(PRESETS.values())))), H200),
    }
    for words, layout in found.items():
        assert layout.name == "replicated"
        assert words in layout.reason
    assert choose_layout("tensor", moe, replace(H200, device="cpu")).name == "tensor"


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_floor_of_a_divided_rank_is_what_the_cost_model_says(name: str, world: int, tmp_path: Path) -> None:
    """But for norms, which every rank has, and projections of key/value heads that ranks share, which the model divides."""
    write_config(name, tmp_path)
    prepared = prepare_model(
        tmp_path, Parallel(0, world), dtype=torch.bfloat16, device="cpu", load_format="dummy", attention_layout="tensor"
    )
    weights = weight_bytes(prepared.config, prepared.parallel, prepared.placement, prepared.weight_bytes, "bfloat16")
    found = step_bytes(weights, prepared.spec, prepared.placement, "bfloat16", batch=8, context=500)
    said = rank_bytes(model_costs(name), Case(batch=8, context=500, per_host=world, layout="tensor"))
    assert (found.experts, found.head, found.cache) == (said.experts, said.head, said.cache)
    assert isinstance(prepared.config, ModelConfig)
    shape = prepared.config.attention
    twice = max(0.0, 1 - shape.kv_heads / world) * len(prepared.spec.caches) * 2 * shape.head_dim * prepared.config.hidden_size * 2
    assert found.dense - twice == pytest.approx(said.dense, rel=1e-3)
    assert found.state == pytest.approx(said.state, rel=1e-6)
