"""Linear layers of few rows on a GPU, every candidate of the tuner against float64; and in graphs, behind kernels that write x.

Kernels are imported in the tests: where there is no GPU, the first import of triton is for its interpreter.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("rows", [1, 4, 13, 32, 64, 100, 128])
def test_every_candidate_computes_the_formula(rows: int) -> None:
    from ep_runtime.bench.few_rows import candidates, check

    found = [check((rows, 2048, config)) for config in candidates(rows, 2048)]
    assert found == [""] * len(found)
    assert len(found) > 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_ragged_sizes_strided_rows_and_a_bias(rows: int, dtype: torch.dtype) -> None:
    from kernels.few_rows import FewRowsConfig
    from kernels.few_rows_triton import linear_rows

    turns = torch.zeros(64, dtype=torch.int32, device="cuda")
    x, weight, bias = (torch.randn(shape, device="cuda").to(dtype) for shape in ((rows, 328), (203, 312), (203,)))
    x = x[:, 16:]
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    for config in (
        FewRowsConfig(way="rows", block_n=4),
        FewRowsConfig(way="tiles", block_n=16, block_k=512, parts=4),
        FewRowsConfig(way="tiles", block_n=16, block_k=128, parts=4),
        FewRowsConfig(way="tiles", block_n=64, block_k=64, splits=3),
        FewRowsConfig(way="tiles", block_n=64, block_k=64, splits=5),
        FewRowsConfig(way="tiles", block_n=32, block_k=64, block_rows=64, splits=2),
    ):
        got = linear_rows(x, weight, bias, config, turns, pdl=True)
        assert float((got.double() - exact).norm() / exact.norm()) < (1e-5 if dtype == torch.float32 else 4e-3), config
        assert not turns.any()


@pytest.mark.parametrize("rows", [1, 8, 128])
def test_a_chain_of_dependent_launches_waits_for_its_inputs(rows: int) -> None:
    """Norm, linear, norm, linear, each of the last one's result, in a graph whose input changes between replays."""
    from ep_runtime.bench.few_rows import candidates
    from kernels.few_rows_triton import linear_rows
    from kernels.rms_norm_triton import norm_rows

    turns = torch.zeros(64, dtype=torch.int32, device="cuda")
    weights = [(torch.randn(2048, 2048, device="cuda") * 2048**-0.5).bfloat16() for _ in range(4)]
    ones = torch.ones(2048, device="cuda", dtype=torch.bfloat16)
    start = torch.randn(rows, 2048, device="cuda").bfloat16()
    for config in candidates(rows, 2048):

        def chain(pdl: bool) -> torch.Tensor:
            x = start
            for weight in weights:
                x = linear_rows(norm_rows(x, ones, 1e-6, pdl=pdl), weight, None, config, turns, pdl=pdl)  # noqa: B023
            return x

        chain(True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(True)
        for _ in range(5):
            start.normal_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, chain(False)), config
