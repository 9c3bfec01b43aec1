"""The memory bank: selection, ties, weights, what is known before a value is read, and the table over several ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model.trellis import ModelConfigError, build_model
from model.trellis.bank import Shard, bank_weights
from model.trellis.bank_shards import finish, local_part, shard_rows
from tests.unit.trellis.trellis_cases import NANO, make, some_ids

SLOTS, WIDTH, PER_TOKEN = 64, 12, 10


def test_equal_scores_go_to_the_lower_slot() -> None:
    bank = make().bank
    with torch.no_grad():
        bank.sub_keys.zero_()
        indices, weights = bank.select(0, torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(indices, torch.arange(4).expand(1, 3, 2, 4))
    assert not bool(weights.any())


@pytest.mark.parametrize("keys", ["random", "repeated", "doublings"])
def test_two_stages_find_what_brute_force_finds(keys: str) -> None:
    """With repeated keys many slots score alike; with doublings in both halves, slots i, j and j, i do."""
    bank = make().bank
    with torch.no_grad():
        if keys == "repeated":
            bank.sub_keys.copy_(bank.sub_keys[:, torch.arange(16) % 5].clone())
        if keys == "doublings":
            bank.sub_keys.zero_()
            bank.sub_keys[..., 0] = 2.0 ** torch.arange(16)
            halves = bank.points[1].q_proj.weight.view(2, 2, 16, 64)
            halves[:, 1] = halves[:, 0]
    h = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        indices, _ = bank.select(1, h)
        q = bank.points[1].q_proj(h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()).view(40, 2, 2, 16)
        q = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        scores = torch.einsum("thzc,zic->zthi", q, bank.sub_keys) / 4
        grid = (scores[0, ..., :, None] + scores[1, ..., None, :]).flatten(-2)
    assert torch.equal(indices[0], grid.sort(dim=-1, descending=True, stable=True).indices[..., :4])


def test_slots_are_known_before_values_are_read() -> None:
    model, ids = make(), some_ids(2, 9)
    with torch.no_grad():
        expected = model(ids).bank[0]
        model.bank.values.fill_(torch.nan)
        poisoned = model(ids).bank[0]
        del model.bank.values
        indices, weights = model.bank.select(0, model.embedding(ids))
    assert torch.equal(poisoned.indices, expected.indices)
    assert (indices.shape, weights.shape) == ((2, 9, 2, 4), (2, 9, 2, 4))
    assert indices.dtype == torch.int64


def test_a_read_is_continuous_where_the_selection_changes() -> None:
    """The last slot weighs nothing; with plain softmax it weighs what its score says."""
    scores = torch.tensor([2.0, 1.0, 0.5, -1.0]).double()
    margin, plain = bank_weights(scores, "margin"), bank_weights(scores, "softmax")
    assert margin[-1] == 0
    torch.testing.assert_close(plain.sum(), torch.tensor(1.0).double())
    torch.testing.assert_close(margin, plain * (1 - torch.exp(-1.0 - scores)))
    settings = make(bank_weighting="softmax")(some_ids(1, 5)).bank[0]
    torch.testing.assert_close(settings.weights.sum(-1), torch.ones(1, 5, 2))


def test_utilization() -> None:
    readout = make()(some_ids(2, 9)).bank[1]
    report, counts = readout.utilization, readout.indices.flatten().bincount(minlength=256).double()
    share = counts[counts > 0] / 144
    assert (report.reads, report.unique_slots) == (144, int((counts > 0).sum()))
    assert report.fraction == report.unique_slots / 256
    assert report.entropy == pytest.approx(-(share * share.log()).sum().item())
    assert not readout.weights.requires_grad


def pieces(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(SLOTS, WIDTH, generator=generator).to(dtype)
    indices = torch.randint(SLOTS, (2, 5, PER_TOKEN), generator=generator)
    return values, indices, torch.rand(2, 5, PER_TOKEN, generator=generator)


def over_ranks(mode: str, world: int, values: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Every rank's part, added up from the last to the first."""
    parts = [local_part(mode, shard_rows(values, rank, world), indices, weights, rank, world) for rank in range(world)]
    return finish(mode, sum(reversed(parts[:-1]), parts[-1]), weights)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["sum", "fixed", "rows"])
def test_the_table_over_ranks(mode: str, dtype: torch.dtype, world: int) -> None:
    values, indices, weights = pieces(dtype)
    exact = (weights.double().unsqueeze(-1) * values.double()[indices]).sum(-2)
    got = over_ranks(mode, world, values, indices, weights)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-5)
    if mode != "sum":
        assert torch.equal(got, over_ranks(mode, 1, values, indices, weights))
    if mode == "rows":
        assert torch.equal(got, over_ranks("sum", 1, values, indices, weights))


@pytest.mark.parametrize("mode", ["sum", "rows"])
def test_gradients_of_shards_are_slices_of_the_whole(mode: str) -> None:
    values, indices, weights = pieces(torch.float32)
    grads = []
    for world in (1, 4):
        whole, weight = values.clone().requires_grad_(), weights.clone().requires_grad_()
        over_ranks(mode, world, whole, indices, weight).square().sum().backward()
        grads.append((whole.grad, weight.grad))
    for one, many in zip(*grads, strict=True):
        torch.testing.assert_close(many, one, rtol=1e-5, atol=1e-5)


def test_fixed_point_sums_refuse_to_train() -> None:
    model, ids = make(bank_shard_mode="fixed"), some_ids(1, 5)
    with pytest.raises(ModelConfigError, match="no gradient"):
        model(ids)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, make()(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["fixed", "rows"])
def test_a_model_of_two_ranks_has_the_bits_of_one(mode: str) -> None:
    """Rank 0's parts and rank 1's are added in lockstep; the audit counts the whole table."""
    ids, whole = some_ids(2, 9), make(bank_shard_mode=mode)
    tensors = whole.state_dict()
    parts: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        for rank in (0, 1, 0):
            # Rank 0 runs twice: alone, to leave its parts of point 0 to rank 1, and then with those of rank 1.
            reads = iter(list(parts[1 - rank]))
            parts[rank] = []

            def reduce(part: torch.Tensor, rank: int = rank, reads=reads) -> torch.Tensor:
                parts[rank].append(part)
                return part + next(reads, torch.zeros_like(part))

            model = build_model(NANO, whole.settings, shard=Shard(rank, 2, reduce))
            model.load_state_dict(tensors | {"bank.values": shard_rows(tensors["bank.values"], rank, 2)})
            out = model(ids)
        expected = whole(ids)
    assert model.bank.values.shape == (128, 32)
    assert model.parameter_report().memory_bank == whole.parameter_report().memory_bank
    assert torch.equal(out.bank[0].indices, expected.bank[0].indices)
    assert torch.equal(out.readouts[0].hidden, expected.readouts[0].hidden)


def test_a_model_without_bank_weighs_what_the_bank_does_not() -> None:
    off = make(replace(NANO, aux=None), bank_enabled=False)
    assert off.parameter_report().memory_bank == make().parameter_report().memory_bank
    assert off(some_ids(1, 4)).bank == ()
