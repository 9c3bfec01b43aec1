"""Expert kernels in the interpreter against a float64 formula, and against the torch reference, over a table of ugly shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from kernels.experts import ExpertForm, Held, run_experts
from kernels.experts_config import ExpertsConfig, Tile, default_config, experts_config
from kernels.experts_grouped import sum_pairs
from kernels.experts_triton import moe_experts, moe_pairs
from kernels.grouping import CHUNK, COUNTERS, SINGLE_PAIRS, group_pairs, most_blocks
from kernels.pairs import Pairs


class Case(NamedTuple):
    id: str
    rows: int
    experts: int
    held: tuple[int, ...]
    top_k: int
    hidden: int
    units: int
    dtype: torch.dtype = torch.float32


CASES = [
    Case("one row", 1, 10, tuple(range(10)), 3, 40, 24),
    Case("one row, nothing here", 1, 10, (9,), 3, 40, 24),
    Case("two rows, half precision", 2, 16, tuple(range(8)), 4, 32, 16, torch.float16),
    Case("ten experts on four ranks", 17, 10, (1, 4, 7), 3, 40, 24),
    Case("one choice", 63, 7, (6, 0, 3), 1, 33, 7),
    Case("every expert chosen", 5, 4, (0, 1, 2, 3), 4, 48, 20),
    Case("one expert gets most", 33, 6, (0, 5), 2, 32, 24, torch.float16),
]


# Rows of 16 bytes' multiples, which tensor descriptors need; tiles past the last unit, output and depth.
PERSISTENT_CASES = [
    Case("one row", 1, 10, tuple(range(10)), 3, 40, 24),
    Case("one row, nothing here", 1, 10, (9,), 3, 40, 24),
    Case("ragged blocks", 37, 5, (1, 2, 4), 2, 40, 24),
    Case("every expert chosen", 17, 4, (0, 1, 2, 3), 4, 48, 20),
    Case("one expert gets most", 33, 6, (0, 5), 2, 32, 24, torch.float16),
    Case("more programs than tiles", 3, 8, (7, 3), 1, 16, 8, torch.float16),
]


def tiles(**flags: bool) -> tuple[Tile, Tile]:
    return Tile(block_n=16, block_k=16, stages=2, **flags), Tile(block_n=32, block_k=32, stages=2, **flags)


FORMS = {
    "paired": ExpertsConfig(form="paired", gate_up=tiles()[0], down=tiles()[1]),
    "paired, two choices at once": ExpertsConfig(form="paired", gate_up=tiles()[0], down=Tile(block_m=2, block_n=16, block_k=16)),
    "grouped": ExpertsConfig(form="grouped", gate_up=tiles()[0], down=tiles()[1]),
    "swap": ExpertsConfig(form="grouped", gate_up=tiles(swap=True)[0], down=tiles(swap=True)[1]),
    "default": None,
}


class Problem(NamedTuple):
    x: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    local: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def make(case: Case, seed: int = 0) -> Problem:
    draw = torch.Generator().manual_seed(seed)
    held = len(case.held)
    local = torch.full((case.experts,), -1, dtype=torch.int64)
    local[list(case.held)] = torch.arange(held)
    scores = torch.rand(case.rows, case.experts, generator=draw)
    if case.id == "one expert gets most":
        scores[:, 5] += 1
    if case.id.endswith("nothing here"):
        scores[:, 9] -= 1
    weights, experts = scores.topk(case.top_k)
    return Problem(
        torch.randn(case.rows, case.hidden, generator=draw).to(case.dtype),
        experts.to(torch.int32),
        weights.softmax(-1),
        local,
        torch.randn(held, 2 * case.units, case.hidden, generator=draw).mul(case.hidden**-0.5).to(case.dtype),
        torch.randn(held, case.hidden, case.units, generator=draw).mul(case.units**-0.5).to(case.dtype),
    )


def formula(problem: Problem) -> np.ndarray:
    """The weighted sum of `down(silu(gate x) * up x)`, pair by pair, in float64."""
    x, weights, gate_up, down = (t.double().numpy() for t in (problem.x, problem.weights, problem.gate_up, problem.down))
    out = np.zeros_like(x)
    for row, choices in enumerate(problem.local[problem.experts.long()].tolist()):
        for choice, expert in enumerate(choices):
            if expert >= 0:
                gate, up = np.split(gate_up[expert] @ x[row], 2)
                out[row] += weights[row, choice] * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, or numbers that are no index, so that what a kernel does not write shows."""
    empty = torch.empty

    def filled(*size, **options):
        out = empty(*size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out.fill_(-(1 << 30))

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_the_sum_is_the_formulas(case: Case, form: str) -> None:
    problem = make(case)
    out = moe_experts(*problem, config=FORMS[form], out_dtype=torch.float32)
    tolerance = 1e-5 if case.dtype == torch.float32 else 3e-3
    np.testing.assert_allclose(out.numpy(), formula(problem), rtol=tolerance, atol=tolerance)
    assert moe_experts(*problem, config=FORMS[form]).dtype == case.dtype


@pytest.mark.parametrize("case", [CASES[3], CASES[4]], ids=lambda case: case.id)
def test_kernels_and_reference_agree(case: Case) -> None:
    problem = make(case, seed=1)
    held = Held(problem.local, torch.tensor(case.held))
    reference = run_experts(ExpertForm.GROUPED, *problem[:1], problem.experts.long(), problem.weights, held, *problem[4:])
    torch.testing.assert_close(moe_experts(*problem, config=FORMS["grouped"]), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
@pytest.mark.parametrize("form", ["paired", "grouped"])
def test_pairs_have_the_same_sums(case: Case, form: str) -> None:
    problem = make(case)
    pairs = moe_pairs(*problem, config=FORMS[form])
    assert isinstance(pairs, Pairs) == (form == "grouped")
    total = sum_pairs(pairs) if isinstance(pairs, Pairs) else pairs
    assert torch.equal(total, moe_experts(*problem, config=FORMS[form]))


def test_descriptors_read_the_same_weights() -> None:
    case = Case("", 9, 5, (0, 2, 4), 2, 40, 24)  # rows of 16 bytes' multiples, and a tile past the last unit of the last expert
    flags = tiles(descriptors=True)
    problem = make(case)
    out = moe_experts(*problem, config=ExpertsConfig(form="grouped", gate_up=flags[0], down=flags[1]))
    np.testing.assert_allclose(out.numpy(), formula(problem), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", PERSISTENT_CASES, ids=[case.id for case in PERSISTENT_CASES])
def test_programs_that_stay_compute_the_formula(case: Case) -> None:
    up, down = (replace(tile, persistent=number) for tile, number in zip(tiles(), (1, 2), strict=True))
    problem = make(case)
    config = ExpertsConfig(form="grouped", gate_up=up, down=down)
    out = moe_experts(*problem, config=config, out_dtype=torch.float32)
    tolerance = 1e-5 if case.dtype == torch.float32 else 3e-3
    np.testing.assert_allclose(out.numpy(), formula(problem), rtol=tolerance, atol=tolerance)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    problem = make(CASES[3])
    whole = moe_experts(*problem, config=FORMS["grouped"])
    for part in (slice(0, 1), slice(3, 9)):
        alone = moe_experts(problem.x[part], problem.experts[part], problem.weights[part], *problem[3:], config=FORMS["grouped"])
        assert torch.equal(alone, whole[part])


def test_no_rows_and_no_experts_give_zeros() -> None:
    problem = make(CASES[3])
    assert moe_experts(problem.x[:0], problem.experts[:0], problem.weights[:0], *problem[3:]).shape == (0, 40)
    nothing = torch.full_like(problem.local, -1)
    out = moe_experts(*problem[:3], nothing, problem.gate_up[:0], problem.down[:0])
    assert torch.equal(out, torch.zeros_like(problem.x))
    assert torch.equal(moe_experts(*problem[:3], nothing, *problem[4:], config=FORMS["grouped"]), torch.zeros_like(problem.x))
    assert not isinstance(moe_pairs(*problem[:3], nothing, problem.gate_up[:0], problem.down[:0]), Pairs)


@pytest.mark.parametrize(
    ("rows", "top_k", "held", "block_rows"),
    [(1, 1, 1, 16), (9, 3, 5, 16), (200, 4, 10, 16), (CHUNK + 5, 5, 12, 64), (3000, 2, 1, 128), (COUNTERS * CHUNK + 99, 1, 12, 64)],
    ids=lambda value: str(value),
)
def test_groups_hold_every_pair_once(rows: int, top_k: int, held: int, block_rows: int) -> None:
    assert (rows * top_k > SINGLE_PAIRS) == (rows > 1000)
    experts = torch.rand(rows, held + 3).topk(top_k).indices.to(torch.int32)
    local = torch.cat((torch.full((3,), -1), torch.arange(held)))
    turns = torch.zeros(1 + COUNTERS * held, dtype=torch.int32)
    groups = group_pairs(experts, local, held, block_rows, turns)
    assert not turns.any()
    meta, bound = groups.meta.numpy(), groups.most_blocks
    mine = local[experts.long()].flatten().numpy()
    counts = np.bincount(mine[mine >= 0], minlength=held)
    assert meta[0] == sum(-(-counts // block_rows)) <= bound == most_blocks(rows * top_k, held, block_rows)
    assert meta[1 : 1 + held].tolist() == counts.tolist()
    expert, start, size = meta[1 + 2 * held :][: 3 * bound].reshape(3, bound)[:, : meta[0]]
    listed = meta[1 + 2 * held + 3 * bound :]
    blocks = [listed[first : first + number] for first, number in zip(start, size, strict=True)]
    for owner, block in zip(expert, blocks, strict=True):
        assert 1 <= len(block) <= block_rows
        assert (mine[block] == owner).all()
    assert sorted(np.concatenate(blocks).tolist() if blocks else []) == np.flatnonzero(mine >= 0).tolist()


def test_configurations_survive_a_file() -> None:
    for rows in (1, 8, 128, 4096):
        config = default_config(rows, 8, 128)
        assert experts_config(config.plain()) == config
    with pytest.raises(ValueError, match="neither"):
        experts_config({**config.plain(), "form": "dense"})
    with pytest.raises(ValueError, match="one grouping"):
        ExpertsConfig(
            form="grouped", gate_up=Tile(block_m=16, block_n=16, block_k=16), down=Tile(block_m=32, block_n=16, block_k=16)
        )


def test_wrong_layouts_are_refused() -> None:
    problem = make(CASES[3])
    with pytest.raises(ValueError, match="down is not contiguous"):
        moe_experts(*problem[:5], problem.down.mT.contiguous().mT)
    with pytest.raises(ValueError, match="shapes do not agree"):
        moe_experts(problem.x[:3], *problem[1:])
    with pytest.raises(ValueError, match="not float32"):
        moe_experts(*problem[:2], problem.weights.double(), *problem[3:])
    groups = group_pairs(problem.experts, problem.local, 3, 32)
    with pytest.raises(ValueError, match="pairs in blocks"):
        moe_experts(*problem, config=FORMS["grouped"], groups=groups)
