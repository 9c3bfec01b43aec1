"""Several loops, served: prompts as the library's forward routes them, decoded rows as its steps under the plan that exits make."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from model.trellis import TrellisConfig, TrellisModel
from model.trellis.served import loops as served_loops
from tests.support.batches import Part
from tests.unit.trellis.served_cases import (
    CONFIGS,
    Reference,
    Serving,
    Turn,
    assert_all_held,
    assert_held,
    assert_logits,
    decode_turn,
    library,
    prompt_turn,
)
from tests.unit.trellis.trellis_cases import NANO, some_ids

EVERY_K = [(name, k) for name, config in CONFIGS.items() for k in range(1, config.k_max + 1)]
LENGTHS = {3: 29, 0: 1, 5: 12, 2: 20}
"""Prompts of sequences in scrambled slots; one is a single row, some pass the window."""


@pytest.fixture(scope="module")
def models() -> dict[str, TrellisModel]:
    return {name: library(config) for name, config in CONFIGS.items()}


def prompts(config: TrellisConfig) -> dict[int, torch.Tensor]:
    return {slot: some_ids(1, length, config, seed=slot) for slot, length in LENGTHS.items()}


def middle(model: TrellisModel, k: int) -> tuple[float, ...]:
    """Thresholds at which equal shares of another text's tokens run 1, 2, .. k loops."""
    with torch.no_grad():
        chances = model(some_ids(4, 30, model.config, seed=99), k=k).exit_logits.double().sigmoid().flatten(1)
    due: list[float] = []
    going = torch.ones_like(chances[0], dtype=torch.bool)
    for loop in range(k - 1):
        due.append(chances[loop][going].quantile(1 - 1 / (k - loop)).item())
        going &= chances[loop] < due[-1]
    return tuple(due)


def open_prompts(serving: Serving, own: dict[int, Reference], ids: dict[int, torch.Tensor]) -> None:
    """All prompts in one forward."""
    output = serving.step(*(prompt_turn(slot, ids[slot][0], own[slot].most) for slot in own))
    assert_logits(output.logits, torch.cat([own[slot].prompt(ids[slot]).logits[0] for slot in own]))
    assert output.depths == (0,) * len(own)


@pytest.mark.parametrize(("name", "k"), EVERY_K)
def test_prompts_and_steps_are_the_library_s(models: dict[str, TrellisModel], name: str, k: int) -> None:
    """Without thresholds every loop runs; whatever a sequence keeps is the bundle's, of loops beyond k nothing."""
    model = models[name]
    serving, own, ids = Serving(model), {slot: Reference(model, k) for slot in LENGTHS}, prompts(model.config)
    open_prompts(serving, own, ids)
    assert_all_held(serving, own)
    tokens = some_ids(6, 4, model.config, seed=5)
    for t, slots in enumerate(((3, 0, 5, 2), (2, 5), (0,), (5, 3, 2, 0))):
        output = serving.step(*(decode_turn(slot, int(tokens[slot, t]), k) for slot in slots))
        assert_logits(output.logits, torch.stack([own[slot].decode(int(tokens[slot, t]))[0] for slot in slots]))
        assert output.depths == (k,) * len(slots)
    assert_all_held(serving, own)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("level", ["zero", "one", "middle", "mixed"])
def test_exits_against_thresholds(models: dict[str, TrellisModel], name: str, level: str) -> None:
    """The plan that follows from the library's own exit logits. A threshold of 0 stops at once, one of 1 never does."""
    model = models[name]
    k = model.config.k_max
    due = {"zero": (0.0,) * (k - 1), "one": (1.0,) * (k - 1), "middle": middle(model, k)}
    due["mixed"] = (*due["middle"][:-1], 0.0)
    own = {slot: Reference(model, k, due[level]) for slot in LENGTHS}
    serving = Serving(model)
    open_prompts(serving, own, prompts(model.config))
    tokens, seen = some_ids(6, 9, model.config, seed=6), set()
    for t in range(9):
        slots = (3, 0, 5, 2) if t % 2 else (5, 2, 3)
        output = serving.step(*(decode_turn(slot, int(tokens[slot, t]), k, due[level]) for slot in slots))
        expected = [own[slot].decode(int(tokens[slot, t])) for slot in slots]
        assert output.depths == tuple(depth for _, depth in expected)
        assert_logits(output.logits, torch.stack([logits for logits, _ in expected]))
        seen.update(output.depths)
    assert seen == {"zero": {1}, "one": {k}, "middle": set(range(1, k + 1)), "mixed": set(range(1, k))}[level]
    assert_all_held(serving, own)


def test_spans_of_every_kind_in_one_forward(models: dict[str, TrellisModel]) -> None:
    """Pieces of one loop, whole prompts of several, decoded rows of each depth, with thresholds, with a given depth."""
    model = models["nano"]
    exits = middle(model, 4)
    own = {0: Reference(model, 1), 1: Reference(model, 4, exits), 2: Reference(model, 3), 3: Reference(model, 2),
           4: Reference(model, 4, exits), 5: Reference(model, 1)}  # fmt: skip
    ids = {slot: some_ids(1, length, seed=40 + slot) for slot, length in zip(own, (17, 14, 21, 9, 1, 30), strict=True)}
    expected = {slot: sequence.prompt(ids[slot]).logits[0] for slot, sequence in own.items()}
    serving = Serving(model)
    one_loop = {slot: ids[slot][0] for slot in (0, 5)}
    output = serving.step(
        Turn(Part(5, one_loop[5][:11].tolist()), prompt=True),
        prompt_turn(1, ids[1][0], 4),
        Turn(Part(0, one_loop[0][:16].tolist()), prompt=True),
        prompt_turn(2, ids[2][0], 3, [20]),
    )
    assert output.depths == (0,) * 4
    assert_logits(output.logits, torch.cat((expected[5][:11], expected[1], expected[0][:16], expected[2][20:])))
    after, depth = own[1].decode(77)
    output = serving.step(
        decode_turn(1, 77, 4, exits),
        prompt_turn(4, ids[4][0], 4),
        Turn(Part(5, one_loop[5][11:29].tolist()), prompt=True),
        decode_turn(0, int(one_loop[0][16]), 1),
        decode_turn(2, 78, 3, depth=2),
        prompt_turn(3, ids[3][0], 2),
    )
    assert output.depths == (depth, 0, 0, 1, 2, 0)
    at_two, _ = own[2].decode(78, 2)
    due = (after[None], expected[4], expected[5][11:29], expected[0][16:], at_two[None], expected[3])
    assert_logits(output.logits, torch.cat(due))
    output = serving.step(
        decode_turn(3, 5, 2), decode_turn(4, 6, 4, exits), decode_turn(5, int(one_loop[5][29]), 1), decode_turn(1, 7, 4, exits)
    )
    others = [own[slot].decode(token) for slot, token in ((3, 5), (4, 6), (1, 7))]
    (at_3, _), (at_4, depth_4), (at_1, depth_1) = others
    assert output.depths == (2, depth_4, 1, depth_1)
    assert_logits(output.logits, torch.stack((at_3, at_4, expected[5][29], at_1)))
    for slot in own:
        assert_held(serving.held(slot), own[slot].held())


def _decode(serving: Serving, k: int, exits: tuple[float, ...], depths: Iterator[tuple[int, ...]] | None) -> list[tuple[int, ...]]:
    """Prompts, then seven steps of three sequences, decided by exits or replayed at given depths."""
    ids, tokens = prompts(NANO), some_ids(6, 7, seed=8)
    serving.step(*(prompt_turn(slot, ids[slot][0], k) for slot in (3, 5, 2)))
    ran = []
    for t in range(7):
        given = (0, 0, 0) if depths is None else next(depths)
        turns = zip((3, 5, 2), given, strict=True)
        output = serving.step(*(decode_turn(slot, int(tokens[slot, t]), k, exits, depth) for slot, depth in turns))
        ran.append(output.depths)
    return ran


def test_given_depths_replay_the_same_bits(models: dict[str, TrellisModel]) -> None:
    """Without asking an exit head, so without waiting for the device. Alone, a sequence is the same up to rounding."""
    model = models["nano"]
    exits = middle(model, 4)
    first, again = Serving(model), Serving(model)
    ran = _decode(first, 4, exits, None)
    assert len({depth for step in ran for depth in step}) == 4
    with torch.no_grad():
        for head in again.models[0].exit_heads.parameters():
            head.fill_(torch.nan)
    assert _decode(again, 4, exits, iter(ran)) == ran
    for slot in (3, 5, 2):
        before, after = first.held(slot), again.held(slot)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    alone, tokens = Serving(model), some_ids(6, 7, seed=8)
    alone.step(prompt_turn(1, prompts(NANO)[5][0], 4))
    for t, step in enumerate(ran):
        alone.step(decode_turn(1, int(tokens[5, t]), 4, depth=step[1]))
    for name, tensor in alone.held(1).items():
        torch.testing.assert_close(tensor, first.held(5)[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rows_that_stop_leave_later_loops_alone(models: dict[str, TrellisModel], depth: int) -> None:
    """No recurrent state of a loop that did not run moves a bit, nor any other sequence's; the cache entry is that of `depth`."""
    model = models["nano"]
    serving = Serving(model)
    for slot in (0, 4):
        serving.step(prompt_turn(slot, some_ids(1, 15, seed=slot)[0], 4))
    before, other = serving.held(4), serving.held(0)
    serving.step(decode_turn(4, 9, 4, depth=depth))
    after = serving.held(4)
    for name, tensor in before.items():
        loop = int(name.split(" ")[0].partition(".")[2] or 0)
        if name[0] in "kv":
            assert torch.equal(after[name][:15], tensor), name
        else:
            assert torch.equal(after[name], tensor) is (loop > depth), name
    assert all(torch.equal(tensor, other[name]) for name, tensor in serving.held(0).items())
    few = Serving(model)
    few.step(prompt_turn(4, some_ids(1, 15, seed=4)[0], 4))
    few.step(decode_turn(4, 9, depth))
    assert all(torch.equal(tensor, after[name]) for name, tensor in few.held(4).items())


def test_rows_of_a_prompt_that_are_skipped_keep_their_bits(models: dict[str, TrellisModel]) -> None:
    """Their hidden states and cache entries after loop j are those after loop j - 1."""
    model, ids = models["nano"], some_ids(1, 24, seed=3)
    serving, seen = Serving(model), []
    own = serving.models[0]
    loop = own._loop
    own._loop = lambda number, h, rows, run: seen.append((number, h, rows)) or loop(number, h, rows, run)
    serving.step(prompt_turn(2, ids[0], 4))
    with torch.no_grad():
        masks = model(ids, k=4).router_masks
    assert [number for number, _, _ in seen] == [1, 2, 3, 4]
    for (_, h, rows), (_, after, _), mask in zip(seen[1:], seen[2:], masks, strict=False):
        chosen = torch.arange(24) if rows.index is None else rows.index
        assert chosen.tolist() == mask[0].nonzero()[:, 0].tolist()
        assert torch.equal(h[~mask[0]], after[~mask[0]])
        assert not (h[mask[0]] == after[mask[0]]).all(-1).any()


class Routes:
    """The positions of prompts that ran each loop, as the served model chose them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[dict[int, list[int]]] = []
        made = served_loops.LoopSchedule._choose

        def choose(schedule: served_loops.LoopSchedule, loop: int, span: int, h: torch.Tensor) -> torch.Tensor | None:
            positions = made(schedule, loop, span, h)
            slot = int(schedule._batch.host.slots[span])
            self.found.append({slot: list(range(len(h))) if positions is None else positions.tolist()})
            return positions

        monkeypatch.setattr(served_loops.LoopSchedule, "_choose", choose)

    def of(self, slot: int) -> list[list[int]]:
        return [found[slot] for found in self.found if slot in found]


def test_routing_does_not_see_what_shares_the_batch(models: dict[str, TrellisModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are ceil(rho n) of each prompt by itself; positions those of the library's forward of the sequence alone."""
    model, ids = models["nano"], prompts(NANO)
    routes = Routes(monkeypatch)
    alone = Serving(model)
    alone.step(prompt_turn(3, ids[3][0], 4))
    mixed = Serving(model)
    mixed.step(prompt_turn(2, ids[2][0], 2))
    mixed.step(
        decode_turn(2, 1, 2),
        prompt_turn(5, ids[5][0], 3),
        Turn(Part(4, ids[2][0].tolist()), prompt=True),
        prompt_turn(3, ids[3][0], 4),
        prompt_turn(0, ids[0][0], 4),
    )
    with torch.no_grad():
        masks = [mask[0].nonzero()[:, 0].tolist() for mask in model(ids[3], k=4).router_masks]
    assert [len(mask) for mask in masks] == [29, 15, 8]
    assert routes.of(3) == masks * 2
    assert [len(chosen) for chosen in routes.of(5)] == [12, 6]
    assert routes.of(4) == routes.of(0) == []
    for name, tensor in alone.held(3).items():
        torch.testing.assert_close(mixed.held(3)[name], tensor, rtol=0, atol=1e-5)


def test_arithmetic_of_rows_that_stopped_is_skipped(models: dict[str, TrellisModel]) -> None:
    """A loop computes its own rows, and none where no row is left; no exit head is asked whose answer is not needed."""
    model = models["nano"]
    serving, counts, asked = Serving(model), [], []
    own = serving.models[0]
    own.core.layers[0].mlp.register_forward_hook(lambda module, given, out: counts.append(out.shape[0]))
    for number, head in own.exit_heads.items():
        head.register_forward_hook(lambda module, given, out, number=number: asked.append((number, out.shape[0])))
    prompt = [prompt_turn(slot, some_ids(1, 8, seed=slot)[0], 4) for slot in range(4)]
    serving.step(*prompt)
    assert (counts, asked) == ([32, 32, 16, 8], [])
    for turns, rows, heads in (
        ([decode_turn(slot, 1, 4, depth=depth) for slot, depth in enumerate((1, 3, 3, 2))], [4, 3, 2], []),
        ([decode_turn(slot, 1, most) for slot, most in enumerate((1, 4, 1, 2))], [4, 2, 1, 1], []),
        ([decode_turn(slot, 1, 4, (0.0, 0.0, 0.0)) for slot in range(3)], [3], [("1", 3)]),
        ([decode_turn(0, 1, 4, (1.0, 1.0, 0.0)), decode_turn(1, 1, 4), decode_turn(2, 1, 3, (0.0, 1.0))], [3, 2, 2, 1],
         [("1", 2), ("2", 1), ("3", 1)]),
        ([decode_turn(0, 1, 4, (1.0, 1.0, 1.0), depth=2)], [1, 1], []),
    ):  # fmt: skip
        counts.clear(), asked.clear()
        serving.step(*turns)
        assert (counts, asked) == (rows, heads)


def test_entries_are_refined_in_place(models: dict[str, TrellisModel]) -> None:
    """Each loop moves the newest entry of the sliding layer, and only that; a window later it is out of sight."""
    model = models["nano"]
    entries = []
    for depth in (1, 2, 3, 4):
        serving = Serving(model)
        serving.step(prompt_turn(0, some_ids(1, 11)[0], 4))
        serving.step(decode_turn(0, 3, 4, depth=depth))
        entries.append(serving.held(0)["k of 5"])
    for earlier, later in pairwise(entries):
        assert torch.equal(earlier[:11], later[:11])
        assert not torch.equal(earlier[11], later[11])
