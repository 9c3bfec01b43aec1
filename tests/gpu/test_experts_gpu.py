"""Expert and router kernels on a GPU against float64, and inside a CUDA graph whose choices change between replays.

Kernels are imported in the tests: where there is no GPU, the first import of triton is for its interpreter.
"""

from __future__ import annotations

import pytest
import torch

from kernels.experts_config import Form

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("number", range(8))
def test_every_form_computes_the_formula(number: int) -> None:
    from ep_runtime.bench.experts_check import SHAPES, check_shape

    assert len(SHAPES) == 8
    rows = check_shape(SHAPES[number])
    assert [row for row in rows if not row["good"]] == []


@pytest.mark.parametrize("number", range(10))
def test_the_router_chooses_what_float64_chooses(number: int) -> None:
    from ep_runtime.bench.experts_check import ROUTERS, check_router

    assert len(ROUTERS) == 10
    assert [row for row in check_router(ROUTERS[number]) if not row["good"]] == []


@pytest.mark.parametrize("rows", [1, 8, 100])
@pytest.mark.parametrize("pdl", [False, True], ids=["", "pdl"])
def test_a_graph_follows_the_choices(rows: int, pdl: bool) -> None:
    from ep_runtime.bench.experts_check import error_of, exact, local_experts, random_weights
    from kernels.experts_config import ExpertsConfig, default_config
    from kernels.experts_triton import moe_experts
    from kernels.router_triton import route_logits

    held, num_experts, top_k = 24, 48, 8
    local, (gate_up, down) = local_experts(num_experts, held), random_weights(held, 512, 256, torch.bfloat16)
    plain = default_config(rows, top_k, held)
    config = ExpertsConfig(form=plain.form, gate_up=plain.gate_up, down=plain.down, pdl=pdl)
    x, logits = torch.randn(rows, 512, device="cuda").bfloat16(), torch.randn(rows, num_experts, device="cuda")

    def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, experts = route_logits(logits, top_k, True)
        return moe_experts(x, experts, weights, local, gate_up, down, config=config), experts, weights

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, experts, weights = layer()
    for _ in range(5):
        x.normal_()
        logits.normal_()
        graph.replay()
        assert error_of(out, exact(x, experts, weights, local, gate_up, down)) < 1e-2


@pytest.mark.parametrize("form", ["paired", "grouped"])
@pytest.mark.parametrize("rows", [1, 5, 8, 40, 128])
@pytest.mark.parametrize("ranks", [1, 4])
def test_layers_after_each_other_overlap_without_harm(rows: int, ranks: int, form: Form) -> None:
    """Each kernel starts while the one before it runs, and reads weights, choices and groups before that has ended."""
    from ep_runtime.bench.experts_chain import Chain
    from ep_runtime.bench.experts_check import exact, random_weights
    from ep_runtime.bench.experts_shapes import Model
    from kernels.experts_config import ExpertsConfig, Tile

    model = Model("small", 512, 256, 64, 6, ranks)
    down = Tile(block_m=4 if form == "paired" else 16, block_n=16, block_k=128)
    config = ExpertsConfig(form=form, gate_up=Tile(block_n=16, block_k=128), down=down, pdl=True)
    weights = random_weights(model.held, model.hidden, model.units, torch.bfloat16)
    chain = Chain(model, rows, 6, weights)
    chain.layer(0, config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [chain.layer(number, config) for number in range(6)]
    plans = [(x.clone(), choices) for x, choices in zip(chain.x, chain.choices, strict=True)]
    for turn in range(3):
        now = plans[turn:] + plans[:turn]
        for x, (new, _), out in zip(chain.x, now, outs, strict=True):
            x.copy_(new)
            out.fill_(float("nan"))
        graph.replay()
        for (x, choices), out in zip(now, outs, strict=True):
            scaled = x.double() * chain.norm.double() * x.double().square().mean(-1, keepdim=True).rsqrt()
            chosen = (scaled @ chain.router.double().T).gather(1, choices).softmax(-1).float()
            want = exact(scaled, choices, chosen, chain.local, *weights)
            # Logits of about 9 are rounded to 8 bits.
            assert (out.double() - want).abs().max() <= 0.05 * want.abs().max() + 1e-6
    assert not chain.turns.any()
