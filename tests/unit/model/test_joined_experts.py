"""A shared expert that kernels run as one more of the experts: one layer's ranks, and whole models, against transformers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from kernels.pairs import Pairs
from kernels.tuning import Tuning, TuningTable
from model.config import MoeConfig
from model.decoder import Decoder
from model.layers.build import Build
from model.layers.fused import FusedOperators
from model.layers.moe import Moe
from model.layers.operators import TorchOperators
from model.layers.step import Step
from model.parallel import ExpertPlacement, Parallel
from tests.support.batches import Part, Ranks, relative_error
from tests.support.checkpoints import clear_prompt, hf_logits, randomise
from tests.support.weights import load_rank

EXPERTS, TOP_K, HIDDEN, UNITS = 10, 3, 48, 24


def fused() -> FusedOperators:
    return FusedOperators(torch.device("cpu"), Tuning(TuningTable("none", ()), lambda message: None), pdl=False)


def block(shared_units: int = UNITS) -> Qwen3NextSparseMoeBlock:
    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=UNITS,
        shared_expert_intermediate_size=shared_units,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    theirs = Qwen3NextSparseMoeBlock(config).eval()
    randomise(theirs, seed=1)
    return theirs


def layer_of(theirs: Qwen3NextSparseMoeBlock, rank: int, world: int, *, row_major: bool = True) -> Moe:
    """One rank's layer with the block's weights."""
    shared_units = theirs.shared_expert.gate_proj.weight.shape[0]
    config = MoeConfig(num_experts=EXPERTS, top_k=TOP_K, intermediate=UNITS, normalise=True, shared_intermediate=shared_units)
    held = ExpertPlacement.build(EXPERTS, world).local(rank)
    layer = Moe(config, HIDDEN, held, Parallel(rank, world), Build(torch.float32, torch.device("cpu"), row_major, fused()))
    assert layer.shared is not None
    assert layer.shared_gate is not None
    shared = theirs.shared_expert
    layer.router.weight.dequantize().copy_(theirs.gate.weight)
    layer.gate_up.dequantize().copy_(theirs.experts.gate_up_proj[list(held)])
    layer.down.dequantize().copy_(theirs.experts.down_proj[list(held)])
    layer.shared.gate_up.weight.dequantize().copy_(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]))
    layer.shared.down.weight.dequantize().copy_(shared.down_proj.weight)
    layer.shared_gate.weight.dequantize().copy_(theirs.shared_expert_gate.weight)
    return layer


def step_with(operators: FusedOperators | TorchOperators) -> Step:
    batch = cast("Any", SimpleNamespace(routing=True, decode_only=False))
    unused = cast("Any", None)
    return Step(batch=batch, state=unused, comm=unused, operators=operators, prepared=None)


def summed(value: torch.Tensor | Pairs) -> torch.Tensor:
    """The rank's partial sum: outputs of choices that are held elsewhere are unwritten, and left out."""
    if not isinstance(value, Pairs):
        return value
    foreign = (value.local[value.experts.long()] < 0).unsqueeze(-1)
    return value.value.view(*value.experts.shape, -1).masked_fill(foreign, 0).sum(1)


@torch.inference_mode()
@pytest.mark.parametrize(("world", "rows"), [*product((1, 2, 3), (0, 1, 2, 3, 7, 64)), (12, 13)])
def test_the_ranks_partial_sums_add_up_to_the_reference(world: int, rows: int) -> None:
    theirs = block()
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))
    total = torch.zeros(rows, HIDDEN)
    routings = []
    for rank in range(world):
        step = step_with(fused())
        pending = layer_of(theirs, rank, world)(x, step)
        assert pending.partial
        assert pending.shared is None
        total += summed(pending.value)
        routings += step.routing
    assert all(torch.equal(routing, routings[0]) for routing in routings)
    if rows:
        expected = theirs(x[None])
        expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
        assert routings[0].sort(-1).values.tolist() == theirs.gate(x)[2].sort(-1).values.tolist()
        assert relative_error(total, expected) < 1e-5


@torch.inference_mode()
def test_each_row_has_its_shared_part_on_one_rank() -> None:
    """With routed experts of zeros, nothing else is left."""
    theirs = block()
    theirs.experts.down_proj.zero_()
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(5))
    for rank in range(3):
        found = summed(layer_of(theirs, rank, 3)(x, step_with(fused())).value).abs().sum(1) > 0
        assert found.tolist() == [row % 3 == rank for row in range(8)]


@torch.inference_mode()
@pytest.mark.parametrize(("row_major", "shared_units"), [(True, 2 * UNITS), (False, UNITS)])
def test_a_shared_expert_stays_apart_where_it_is_unlike_or_memory_is_transposed(row_major: bool, shared_units: int) -> None:
    layer = layer_of(block(shared_units), 0, 1, row_major=row_major)
    assert layer.sharers == 0
    assert layer.held.local.shape == (EXPERTS,)
    if row_major:
        pending = layer(torch.ones(3, HIDDEN), step_with(fused()))
        assert pending.shared is not None
        assert pending.shared_gate is not None


@torch.inference_mode()
@pytest.mark.parametrize("rank", [0, 2])
def test_the_torch_form_runs_joined_weights_apart(rank: int) -> None:
    theirs = block()
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(7))
    joined, apart = (layer_of(theirs, rank, 3, row_major=row_major)(x, step_with(TorchOperators())) for row_major in (True, False))
    assert torch.allclose(joined.value, apart.value, atol=1e-6)
    assert joined.shared is not None
    assert apart.shared is not None
    assert torch.allclose(joined.shared, apart.shared, atol=1e-6)


@pytest.fixture
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter changes its language module while a kernel runs: ranks that are threads must take turns."""
    from triton.runtime.interpreter import GridExecutor

    turn, run = threading.Lock(), GridExecutor.__call__

    def alone(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        with turn:
            run(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", alone)


@pytest.mark.usefixtures("one_kernel_at_a_time")
@pytest.mark.parametrize(
    ("family", "variant", "world", "split"),
    [("qwen3_next", "heads", 2, True), ("qwen3_5_moe", "fused", 3, False)],
)
def test_whole_models_on_ranks_give_the_logits_of_the_reference(
    checkpoint: Callable[[str, str], Path], family: str, variant: str, world: int, split: bool
) -> None:
    path = checkpoint(family, variant)

    def load(path: Path, rank: int, world: int) -> Decoder:
        return load_rank(path, rank, world, operators=fused(), split=split)

    ranks = Ranks(path, world, load=load)
    first, second = clear_prompt(path, 14, 1), clear_prompt(path, 6, 2)
    expected = [hf_logits(path, tokens) for tokens in (first, second)]
    assert relative_error(ranks.prompt(0, first[:13], chunk=10), expected[0][:13]) < 1e-4
    rows = ranks.logits(Part(1, second[:5], [4]), Part(0, first[13:], [0]))
    assert relative_error(rows[0], expected[1][4]) < 1e-4
    assert relative_error(rows[1], expected[0][13]) < 1e-4
    assert relative_error(ranks.logits(Part(1, second[5:], [0]))[0], expected[1][5]) < 1e-4
