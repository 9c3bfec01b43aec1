"""With GPU kernels (here in Triton's interpreter) the served model is the library's, and a decode step may be captured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from model.base import SingleRank
from model.batch import ForwardBatch, HostBatch
from model.state.registry import StateRegistry
from model.trellis import TrellisModel
from model.trellis.presets import PRESETS
from model.trellis.served import ServedTrellis
from tests.support.batches import Part
from tests.unit.trellis.served_cases import (
    ODD,
    Reference,
    Serving,
    Turn,
    assert_all_held,
    assert_logits,
    decode_turn,
    library,
    prompt_turn,
)
from tests.unit.trellis.trellis_cases import NANO, some_ids


@pytest.fixture(autouse=True)
def blocks_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their size is a multiple of 16."""
    monkeypatch.setattr("tests.support.batches.BLOCK_SIZE", 16)


@pytest.fixture(scope="module", params=["sliding", "all"])
def model(request: pytest.FixtureRequest) -> TrellisModel:
    """Six query heads a key/value head as in the shipped model; norms of queries and keys in one layer or in all."""
    return library(replace(NANO, heads=6, kv_heads=1, qk_norm=request.param))


def test_pieces_and_rows_of_one_loop(model: TrellisModel) -> None:
    serving, own = Serving(model, kernels=True), {slot: Reference(model, 1) for slot in (4, 1)}
    ids = {4: some_ids(1, 40, seed=4), 1: some_ids(1, 21, seed=1)}
    expected = {slot: sequence.prompt(ids[slot]).logits[0] for slot, sequence in own.items()}
    rows = {slot: ids[slot][0].tolist() for slot in ids}
    assert_logits(serving.prompt(4, rows[4][:38], 23), expected[4][:38])
    got = serving.logits(Part(4, rows[4][38:39]), Part(1, rows[1][:20]))
    assert_logits(got, torch.cat((expected[4][38:39], expected[1][:20])))
    got = serving.logits(Part(1, rows[1][20:]), Part(4, rows[4][39:]))
    assert_logits(got, torch.cat((expected[1][20:], expected[4][39:])))
    assert_all_held(serving, own)


def test_several_loops(model: TrellisModel) -> None:
    """A prompt's later loops run a part of its rows, beside other spans' rows."""
    serving, own = Serving(model, kernels=True), {0: Reference(model, 4), 3: Reference(model, 3), 5: Reference(model, 1)}
    ids = {slot: some_ids(1, length, seed=slot) for slot, length in ((0, 37), (3, 18), (5, 9))}
    expected = {slot: sequence.prompt(ids[slot]).logits[0] for slot, sequence in own.items()}
    assert_logits(serving.step(prompt_turn(3, ids[3][0], 3)).logits, expected[3])
    after, _ = own[3].decode(7, 2)
    output = serving.step(
        decode_turn(3, 7, 3, depth=2), prompt_turn(0, ids[0][0], 4), Turn(Part(5, ids[5][0].tolist()), prompt=True)
    )
    assert_logits(output.logits, torch.cat((after[None], expected[0], expected[5])))
    output = serving.step(decode_turn(0, 8, 4), decode_turn(3, 9, 3, depth=1))
    assert_logits(output.logits, torch.stack((own[0].decode(8)[0], own[3].decode(9, 1)[0])))
    assert_all_held(serving, own)


def captured(serving: Serving, rows: list[tuple[int, int]], size: int) -> ForwardBatch:
    """A decode step as a graph has it: `rows` of (slot, token), then idle ones; on the host there are shapes and nothing else."""
    idle = size - len(rows)
    slots, tokens = [slot for slot, _ in rows], [token for _, token in rows]
    at = [serving.lengths[slot] for slot in slots]
    if rows:
        serving.batch([Part(slot, [token]) for slot, token in rows])  # blocks and lengths grow
    block = serving.states[0].block_size
    tables = torch.zeros(size, 4, dtype=torch.int32)
    for row, slot in enumerate(slots):
        tables[row, : len(serving.blocks[slot])] = torch.tensor(serving.blocks[slot], dtype=torch.int32)
    places = [serving.blocks[slot][place // block] * block + place % block for slot, place in zip(slots, at, strict=True)]
    nothing = np.zeros(size, dtype=np.int32)
    every = torch.arange(size + 1, dtype=torch.int32)
    return ForwardBatch(
        token_ids=torch.tensor(tokens + [0] * idle),
        positions=torch.tensor(at + [0] * idle, dtype=torch.int32),
        query_start=every,
        slots=torch.tensor(slots + [-1] * idle, dtype=torch.int32),
        seq_lens=torch.tensor([place + 1 for place in at] + [0] * idle, dtype=torch.int32),
        block_tables=tables,
        kv_write_from=torch.zeros(size, dtype=torch.int32),
        wanted_rows=every[:size].long(),
        kv_places=torch.tensor(places + [-1] * idle),
        host=HostBatch(query_start=every.numpy(), seq_lens=nothing, slots=nothing, max_query=1, max_seq=64, single_lens=nothing),
        block_size=block,
    )


def everything(state: StateRegistry) -> list[torch.Tensor]:
    caches = [tensor.clone() for cache in state.spec.caches for tensor in state.kv(cache.layer)]
    return caches + [state.recurrent(each.layer, each.name).clone() for each in state.spec.states]


@pytest.mark.parametrize("slots", [(2, 5), (0, 3), (4,)], ids=str)
def test_a_step_with_idle_rows(model: TrellisModel, slots: tuple[int, ...]) -> None:
    """Idle rows move nothing, in slot 0 or elsewhere; those of sequences see nothing of them."""
    serving, own = Serving(model, kernels=True), {slot: Reference(model, 1) for slot in range(6)}
    prompts, state = Serving(model), serving.states[0]
    prompts.states, prompts.lengths, prompts.blocks = serving.states, serving.lengths, serving.blocks
    prompts._free = serving._free
    for slot, sequence in own.items():
        ids = some_ids(1, 11 + slot, seed=slot)
        sequence.prompt(ids)
        prompts.prompt(slot, ids[0].tolist())
    with torch.inference_mode():
        before = everything(state)
        logits = serving.models[0](captured(serving, [], 3), state, SingleRank()).logits
        assert bool(logits.isfinite().all())
        assert all(torch.equal(one, other) for one, other in zip(before, everything(state), strict=True))
        batch = captured(serving, [(slot, 30 + slot) for slot in slots], 4)
        logits = serving.models[0](batch, state, SingleRank()).logits
    assert_logits(logits[: len(slots)], torch.stack([own[slot].decode(30 + slot)[0] for slot in slots]))
    assert_all_held(serving, own)


def test_which_decode_steps_may_be_captured() -> None:
    def made(config: object, *, kernels: bool) -> ServedTrellis:
        return ServedTrellis(config, rank=0, world=1, dtype=torch.bfloat16, device="meta", kernels=kernels)

    shipped = PRESETS["trellis-180m"]
    assert made(shipped, kernels=True).static_decode(16)
    assert not made(shipped, kernels=True).static_decode(24)
    assert not made(shipped, kernels=False).static_decode(16)
    assert not made(ODD, kernels=True).static_decode(16)


def test_sizes_that_kernels_do_not_take_run_in_torch() -> None:
    model = library(ODD)
    ids, serving = some_ids(1, 23, ODD), Serving(model, kernels=True)
    assert_logits(serving.prompt(1, ids[0].tolist(), 9), Reference(model, 1).prompt(ids).logits[0])
