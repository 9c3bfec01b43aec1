"""The router's kernels in the interpreter against softmax and a sort in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.experts_config import ExpertsConfig, Tile
from kernels.experts_triton import moe_experts
from kernels.grouping import Groups, group_pairs
from kernels.router import route
from kernels.router_triton import COUNTERS, FUSED_ROWS, MOST_HELD, route_logits, route_rows


def expected(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[np.ndarray, np.ndarray]:
    """Weights and experts; of equal logits the lower expert comes first."""
    plain = logits.double().numpy()
    experts = np.argsort(-plain, axis=1, kind="stable")[:, :top_k]
    weights = np.exp(plain - plain.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    weights = np.take_along_axis(weights, experts, 1)
    return weights / weights.sum(1, keepdims=True) if normalise else weights, experts


@pytest.mark.parametrize("normalise", [True, False], ids=["normalised", "plain"])
@pytest.mark.parametrize(
    ("rows", "num_experts", "top_k"), [(1, 128, 8), (3, 60, 4), (17, 10, 1), (2, 512, 10), (5, 6, 6)], ids=lambda value: str(value)
)
def test_choices_and_weights(rows: int, num_experts: int, top_k: int, normalise: bool) -> None:
    logits = torch.randn(rows, num_experts, generator=torch.Generator().manual_seed(rows)) * 3
    weights, experts = route_logits(logits, top_k, normalise)
    want_weights, want_experts = expected(logits, top_k, normalise)
    assert weights.dtype == torch.float32
    assert experts.dtype == torch.int32
    np.testing.assert_array_equal(experts.numpy(), want_experts)
    np.testing.assert_allclose(weights.numpy(), want_weights, rtol=2e-6, atol=1e-8)
    reference_weights, reference_experts = route(logits, top_k, normalise)
    assert torch.equal(experts.long(), reference_experts)
    torch.testing.assert_close(weights, reference_weights, rtol=2e-6, atol=1e-8)


# Weights of rows without a finite logit are NaN, of which numpy, which interprets the kernel, warns.
NAN_IS_MEANT = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")


@NAN_IS_MEANT
def test_equal_logits_go_to_the_lower_expert() -> None:
    logits = torch.tensor(
        [[1.0, 3.0, 3.0, 0.0, 3.0], [0.0, -0.0, 0.0, -0.0, 0.0], [-torch.inf] * 5, [torch.inf, 1, 2, 1, -torch.inf]]
    )
    experts = route_logits(logits, 3, True)[1]
    assert experts.tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, 2], [0, 2, 1]]


@NAN_IS_MEANT
def test_rows_with_nan_choose_experts_that_exist() -> None:
    logits = torch.randn(4, 10)
    logits[1], logits[2, 3], logits[3, 4] = torch.nan, torch.nan, -torch.tensor(torch.nan)
    weights, experts = route_logits(logits, 4, True)
    assert experts.min() >= 0
    assert experts.max() < 10
    assert all(len(set(row)) == 4 for row in experts.tolist())
    assert weights[1].isnan().all()
    assert weights[0].isfinite().all()


@pytest.mark.parametrize(
    ("rows", "num_experts", "top_k", "hidden"),
    [(1, 10, 3, 40), (FUSED_ROWS, 60, 4, 72), (3, 7, 1, 2100), (1, 9, 9, 2100), (17, 130, 5, 48), (100, 160, 3, 40)],
    ids=lambda value: str(value),
)
def test_the_products_kernel_chooses_alike(rows: int, num_experts: int, top_k: int, hidden: int) -> None:
    draw = torch.Generator().manual_seed(3)
    x, router = torch.randn(rows, hidden, generator=draw), torch.randn(num_experts, hidden, generator=draw)
    turn = torch.zeros(COUNTERS, dtype=torch.int32)
    for normalise in (True, False):
        weights, experts, groups = route_rows(x, router, top_k, normalise, turn)
        want_weights, want_experts = expected(x.double() @ router.double().T, top_k, normalise)
        np.testing.assert_array_equal(experts.numpy(), want_experts)
        np.testing.assert_allclose(weights.numpy(), want_weights, rtol=1e-4, atol=1e-6)
        assert not turn.any()
        assert groups is None


def test_groups_made_with_the_choice_serve_the_experts() -> None:
    draw = torch.Generator().manual_seed(4)
    x, router = torch.randn(7, 40, generator=draw), torch.randn(10, 40, generator=draw)
    local = torch.full((10,), -1)
    local[[1, 4, 7]] = torch.arange(3)
    gate_up, down = torch.randn(3, 48, 40, generator=draw), torch.randn(3, 40, 24, generator=draw)
    weights, experts, groups = route_rows(x, router, 3, True, torch.zeros(COUNTERS, dtype=torch.int32), local, 3, 16)
    tile = Tile(block_n=16, block_k=16)
    config = ExpertsConfig(form="grouped", gate_up=tile, down=tile)
    with_groups = moe_experts(x, experts, weights, local, gate_up, down, config=config, groups=groups)
    assert torch.equal(with_groups, moe_experts(x, experts, weights, local, gate_up, down, config=config))
    assert with_groups.abs().max() > 0


def with_shared(logits: torch.Tensor, top_k: int, normalise: bool, world: int) -> tuple[np.ndarray, np.ndarray]:
    """What is expected of logits whose last column is the shared expert's gate, of which row t's is rank `t % world`'s."""
    weights, experts = expected(logits[:, :-1], top_k, normalise)
    gate = 1 / (1 + np.exp(-logits[:, -1:].double().numpy()))
    owner = logits.shape[1] - 1 + np.arange(len(logits))[:, None] % world
    return np.concatenate((weights, gate), 1), np.concatenate((experts, owner), 1)


@pytest.mark.parametrize("normalise", [True, False], ids=["normalised", "plain"])
@pytest.mark.parametrize(
    ("rows", "num_experts", "top_k", "world"),
    [(1, 16, 3, 2), (7, 10, 8, 1), (40, 33, 4, 3), (16, 128, 5, 4)],
    ids=lambda value: str(value),
)
def test_the_shared_expert_is_one_more_choice(rows: int, num_experts: int, top_k: int, world: int, normalise: bool) -> None:
    draw = torch.Generator().manual_seed(rows)
    x, router = torch.randn(rows, 40, generator=draw), torch.randn(num_experts + 1, 40, generator=draw)
    logits = x.double() @ router.double().T
    turns = torch.zeros(COUNTERS, dtype=torch.int32)
    want_weights, want_experts = with_shared(logits, top_k, normalise, world)
    fused = route_rows(x, router, top_k, normalise, turns, shared=world)[:2]
    for weights, experts in (fused, route_logits(logits.float(), top_k, normalise, shared=world)):
        assert weights.shape == experts.shape == (rows, top_k + 1)
        np.testing.assert_array_equal(experts.numpy(), want_experts)
        np.testing.assert_allclose(weights.numpy(), want_weights, rtol=1e-4, atol=1e-6)
    assert not turns.any()


def check_groups(groups: Groups, experts: torch.Tensor, local: torch.Tensor) -> None:
    """Every pair of an expert that is held is in one block of its expert, and nothing else is."""
    meta, held, bound = groups.meta.numpy(), groups.held, groups.most_blocks
    mine = local[experts.long()].flatten().numpy()
    counts = np.bincount(mine[mine >= 0], minlength=held)
    assert meta[0] == sum(-(-counts // groups.block_rows)) <= bound
    assert meta[1 : 1 + held].tolist() == counts.tolist()
    starts = meta[1 + held : 1 + 2 * held]
    listed = meta[1 + 2 * held + 3 * bound :]
    for owner in range(held):
        assert sorted(listed[starts[owner] :][: counts[owner]].tolist()) == np.flatnonzero(mine == owner).tolist()
    blocks = meta[1 + 2 * held :][: 3 * bound].reshape(3, bound)[:, : meta[0]].T.tolist()
    want = [
        [owner, starts[owner] + first, min(groups.block_rows, counts[owner] - first)]
        for owner in range(held)
        for first in range(0, counts[owner], groups.block_rows)
    ]
    assert sorted(blocks) == sorted(want)


@pytest.mark.parametrize("shared", [0, 1, 3])
@pytest.mark.parametrize(
    ("rows", "num_experts", "top_k", "block_rows"),
    [
        (1, 10, 3, 16),
        (16, 24, 5, 16),
        (12, 24, 9, 16),
        (9, 60, 4, 32),
        (33, 24, 4, 16),
        (5, 24, 4, 8),
        (5, 24, 4, 4),
        (100, 7, 7, 32),
    ],
    ids=lambda value: str(value),
)
def test_groups_are_made_with_the_choice(rows: int, num_experts: int, top_k: int, block_rows: int, shared: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    x, router = torch.randn(rows, 40, generator=draw), torch.randn(num_experts + (shared > 0), 40, generator=draw)
    local = torch.full((num_experts + shared,), -1)
    here = torch.cat((torch.arange(0, num_experts, 2).flip(0), torch.arange(num_experts, num_experts + shared)[-1:]))
    local[here] = torch.arange(len(here))
    turns = torch.zeros(COUNTERS, dtype=torch.int32)
    _, experts, groups = route_rows(x, router, top_k, True, turns, local, len(here), block_rows, shared=shared)
    assert groups is not None
    check_groups(groups, experts, local)
    check_groups(group_pairs(experts, local, len(here), block_rows), experts, local)
    assert not turns.any()


def test_more_experts_than_can_be_counted_are_not_grouped() -> None:
    router, turns = torch.randn(MOST_HELD + 1, 16), torch.zeros(COUNTERS, dtype=torch.int32)
    x, local = torch.randn(20, 16), torch.arange(MOST_HELD + 1)
    assert route_rows(x, router, 2, True, turns, local, MOST_HELD + 1, 16)[2] is None
    local -= 1
    _, experts, groups = route_rows(x, router, 2, True, turns, local, MOST_HELD, 16)
    assert groups is not None
    check_groups(groups, experts, local)


def test_bfloat16_logits_are_ordered_with_their_ties() -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0, 2.0, -0.0, 0.0, -torch.inf], [-3.0, -2.0, -2.0, -1.0, -1.0, -4.0, -0.5]]).bfloat16()
    weights, experts = route_logits(logits, 5, True)
    want_weights, want_experts = expected(logits, 5, True)
    assert experts.tolist() == want_experts.tolist() == [[2, 3, 0, 4, 5], [6, 3, 4, 1, 2]]
    np.testing.assert_allclose(weights.numpy(), want_weights, rtol=2e-6)


def test_too_many_rows_and_wrong_layouts_are_refused() -> None:
    router, turn = torch.randn(10, 40), torch.zeros(COUNTERS, dtype=torch.int32)
    with pytest.raises(ValueError, match="rows"):
        route_rows(torch.randn(FUSED_ROWS + 1, 40), router, 3, True, turn)
    with pytest.raises(ValueError, match="contiguous"):
        route_rows(torch.randn(40, 2).T, router, 3, True, turn)
