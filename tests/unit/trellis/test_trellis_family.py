"""Trellis as a family of the runtime: found by name, read or refused by field, described and counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_runtime.bench.configs import write_config
from ep_runtime.bench.floor import split, step_bytes, weight_bytes
from model.errors import CheckpointError, ModelError, UnsupportedModel
from model.families.registry import family_of, resolve, spec_of, supported, weight_map
from model.parallel import ExpertPlacement, Parallel
from model.spec import CacheSpec, LayerKind
from model.state.registry import StateRegistry
from model.trellis.checkpoint import config_to_json
from model.trellis.presets import PRESETS
from model.trellis.served import trellis_spec
from protocol.ack import MESSAGE_BYTES
from protocol.sections import pack_sections
from protocol.slots import table_sections
from tests.unit.trellis.trellis_cases import NANO, NO_SLIDING

FULL = PRESETS["trellis-180m"]
NONE = ExpertPlacement.build(0, 1)


def test_the_registry_finds_it_and_keeps_what_the_folder_says() -> None:
    assert "TrellisForCausalLM" in supported()
    assert family_of("TrellisForCausalLM").name == "trellis"
    config = resolve(config_to_json(NANO), {"eos_token_id": [7, 9]})
    assert (config.architecture, config.trellis, config.eos_token_ids, config.vision) == ("TrellisForCausalLM", NANO, (7, 9), None)
    assert resolve(config_to_json(NANO)).eos_token_ids == ()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"trellis_layout": 2}, "trellis_layout = 2"),
    "kind": ({"model_type": "llama"}, "model_type = 'llama'"),
    "surplus": ({"dtype": "float32"}, "has dtype"),
    "type": ({"window": "8"}, "window = '8'"),
    "heads": ({"kv_heads": 3}, "kv_heads = 3"),
    "schedule": ({"rho": ["1.0", "0.25", "0.5"]}, "rho = "),
    "layer": ({"core": ["gdn", "global"]}, "core = "),
    "aux": ({"aux": {"width": 64, "depth": 3}}, "depth"),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_field(name: str) -> None:
    change, told = REFUSED[name]
    with pytest.raises(ModelError, match=told):
        resolve(config_to_json(NANO) | change)


def test_a_missing_field_is_named() -> None:
    config = config_to_json(NANO)
    del config["bank_top_k"]
    with pytest.raises(CheckpointError, match="lacks bank_top_k"):
        resolve(config)


def test_end_tokens_that_are_none_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="eos_token_id"):
        resolve(config_to_json(NANO), {"eos_token_id": "end"})


def test_a_bank_that_ranks_cannot_share_evenly_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"bank_sub_keys = 16 .* 3 ranks"):
        weight_map(resolve(config_to_json(NANO)), ExpertPlacement.build(0, 3), Parallel(1, 3))


def test_spec() -> None:
    """Layers are numbered once, in order; the core's have a recurrent state for each loop; a sequence is as long as in training."""
    spec = spec_of(resolve(config_to_json(NANO), {"eos_token_id": 3}))
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.max_positions) == (256, 64, 10, 64)
    assert (spec.max_loops, spec.single_chunk, spec.cut_points, spec.eos_token_ids) == (4, False, 1, (3,))
    assert (spec.num_experts, spec.moe_layers, spec.rewindable) == (0, (), False)
    shape = {"kv_heads": 2, "head_dim": 16}
    assert spec.caches == (CacheSpec(layer=1, **shape), CacheSpec(layer=5, window=8, **shape), CacheSpec(layer=9, **shape))
    kinds = [LayerKind.LINEAR] * 10
    kinds[1] = kinds[9] = LayerKind.FULL
    kinds[5] = LayerKind.SLIDING
    assert list(spec.layer_kinds) == kinds
    matrices = [state for state in spec.states if state.dtype == "float32"]
    others = [state for state in spec.states if state.dtype != "float32"]
    assert len(matrices) == len(others) == 22
    assert {state.elements for state in matrices} == {4 * 16 * 24}
    assert {state.elements for state in others} == {3 * 4 * (16 + 16 + 24)}
    instances = {layer: sum(state.layer == layer for state in matrices) for layer in range(10)}
    assert instances == {0: 1, 1: 0, 2: 4, 3: 4, 4: 4, 5: 0, 6: 4, 7: 4, 8: 1, 9: 0}
    assert len(spec_of(resolve(config_to_json(NO_SLIDING))).states) == 2 * 26


@pytest.mark.parametrize("world", [1, 4])
def test_floor_of_a_step_of_one_loop(world: int) -> None:
    """From the audit's rows: all blocks once, the norms and gains of one loop, both read points, the keys, and the head."""
    config = resolve(config_to_json(replace(FULL, aux=None)))
    placement = ExpertPlacement.build(0, world)
    parts = weight_bytes(config, Parallel(0, world), placement, 0, "bfloat16")
    norms = 10 * 2 * 768 + 6 * 2 * 768 + 768 + 7 * 12 * 96 + 2 * 64
    bank = 2 * (768 * 768 + 768 * 256) + 2 * 512 * 192
    assert parts.dense == 2 * (13_791_744 + 44_579_328 + 13_791_744 + norms + bank)
    assert parts.head == 2 * 37_748_736
    step = step_bytes(parts, spec_of(config), placement, "bfloat16", batch=3, context=100)
    assert step.experts == 3 * 2 * 2 * 32 * 256 * 2 // world
    assert step.cache == 3 * 100 * 3 * 2 * (2 * 64) * 2
    assert step.state == 2 * 3 * 7 * (3 * 2688 * 2 + 12 * 64 * 96 * 4)
    assert split(step, 2).experts == step.experts
    if world > 1:
        assert weight_bytes(config, Parallel(1, world), placement, 0, "bfloat16").head == 0


def test_the_benchmarks_configuration(tmp_path: Path) -> None:
    write_config("trellis-180m", tmp_path)
    config = resolve(json.loads((tmp_path / "config.json").read_text()))
    assert config.trellis == replace(FULL, aux=None)
    with pytest.raises(ValueError, match="trellis-180m is not shortened"):
        write_config("trellis-180m", tmp_path, layers=2)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_sections_of_all_loops_fit_into_an_ack(name: str) -> None:
    """A text that is cut would leave ranks that differ without a word of where."""
    spec = trellis_spec(replace(PRESETS[name], aux=None))
    state = StateRegistry(spec, max_slots=1, num_blocks=1, block_size=16, dtype=torch.float32, device="cpu")
    names = [*table_sections([None]), *state.section_sums([0]), "routing", "inputs", "outputs", "rows"]
    assert len(pack_sections(dict.fromkeys(names, 0)).encode()) <= MESSAGE_BYTES
    assert {"conv", "h"} <= set(names)
