"""The value table shared out: outputs, states and routing have the same bits at 1, 2 and 4 ranks, and the ranks agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model.batch import ForwardOutput
from model.trellis import TrellisModel, build_model
from model.trellis.bank_shards import shard_rows
from model.trellis.served.bank import MOST_RANKS, from_digits, to_digits
from tests.support.batches import Part
from tests.unit.trellis.served_cases import Serving, Turn, decode_turn, library, loop_rows, prompt_turn
from tests.unit.trellis.trellis_cases import some_ids

EXITS = (0.5, 0.55, 0.5)
ODD_ROWS = 7


@pytest.fixture(scope="module")
def model() -> TrellisModel:
    return library()


def turns_of(step: int) -> list[Turn]:
    """Prompts of several kinds, then steps that exits decide; one loop too."""
    if step == 0:
        return [
            prompt_turn(3, some_ids(1, 19, seed=3)[0], 4, [18]),
            Turn(Part(1, some_ids(1, ODD_ROWS)[0].tolist(), [ODD_ROWS - 1]), prompt=True),
            prompt_turn(0, some_ids(1, 12, seed=1)[0], 3, [0, 11]),
        ]
    return [decode_turn(0, step, 3, EXITS[:2]), decode_turn(1, step, 1), decode_turn(3, step, 4, EXITS)]


def run(model: TrellisModel, world: int) -> tuple[Serving, list[list[ForwardOutput]]]:
    serving = Serving(model, world)
    found = []
    for step in range(6):
        turns = turns_of(step)
        found.append(serving.run(serving.batch([turn.part for turn in turns], loops=loop_rows(turns), routing=True)))
    return serving, found


@pytest.mark.parametrize("world", [2, 4])
def test_the_bits_of_one_rank(model: TrellisModel, world: int) -> None:
    alone, expected = run(model, 1)
    serving, found = run(model, world)
    depths = set()
    for outputs, (due,) in zip(found, expected, strict=True):
        assert torch.equal(outputs[0].logits, due.logits)
        assert all(output.logits is None for output in outputs[1:])
        for output in outputs:
            assert torch.equal(output.routing, due.routing)
            assert torch.equal(output.inputs, due.inputs)
            assert output.depths == due.depths
        depths.update(due.depths)
    assert depths == {0, 1, 2, 3, 4}
    for slot in (0, 1, 3):
        due_held = alone.held(slot)
        for rank in range(world):
            assert all(torch.equal(tensor, due_held[name]) for name, tensor in serving.held(slot, rank).items())
    launched = [rank.launched for rank in serving.group.ranks]
    assert all(names == launched[0] for names in launched)
    assert [name for name in launched[0] if name != "settle"] == ["reduce"] * 2 * len(found)


def test_each_rank_has_its_rows_alone(model: TrellisModel) -> None:
    """The rows of another rank are nowhere: with them changed on their owner, the answer changes."""
    serving, due = Serving(model, 2), Serving(model, 2)
    prompt = Part(0, some_ids(1, 9)[0].tolist())
    for rank, own in enumerate(serving.models):
        assert torch.equal(own.bank.values, shard_rows(model.bank.values, rank, 2))
    with torch.no_grad():
        serving.models[1].bank.values *= 1.5
    assert not torch.allclose(serving.logits(prompt), due.logits(prompt), atol=1e-4)


def test_the_sum_of_one_rank_is_the_library_s(model: TrellisModel) -> None:
    """In the mode that serving uses, to the bit of a forward of one sequence alone, prelude and first read."""
    fixed = build_model(model.config, replace(model.settings, bank_shard_mode="fixed"))
    fixed.load_state_dict(model.state_dict())
    ids = some_ids(1, 17)
    for world in (1, 4):
        got = Serving(model, world).logits(Part(2, ids[0].tolist()))
        with torch.no_grad():
            torch.testing.assert_close(got, fixed(ids, k=1).logits[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("world", [1, 2, 3, 16, MOST_RANKS])
def test_digits_sum_exactly_in_float32(world: int) -> None:
    """In any order: numbers of either sign, as large as a sum of 2^63 lets every rank's be, and the edges of digits."""
    generator = torch.Generator().manual_seed(world)
    most = (1 << 63) // world - 1
    numbers = torch.randint(-most, most, (world, 3, 50), generator=generator)
    edges = torch.tensor([0, 1, -1, 0xFFFF, 0x10000, -0x10000, (1 << 48) - 1, 1 << 48, -(1 << 48), most, -most, 1 << 32]) % most
    numbers[:, 0, : len(edges)] = edges
    numbers[:, 1, : len(edges)] = -edges
    exact = [[sum(numbers[rank, row, at].item() for rank in range(world)) for at in range(50)] for row in range(3)]
    for order in (torch.arange(world), torch.randperm(world, generator=generator)):
        total = torch.zeros(3, 200)
        for rank in order.tolist():
            lanes = to_digits(numbers[rank])
            assert (lanes.dtype, lanes.shape) == (torch.float32, (3, 200))
            total = total + lanes
        assert from_digits(total).tolist() == exact
