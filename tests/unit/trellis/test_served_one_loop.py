"""Served at one loop, Trellis is like any model: pieces of any size beside decoding rows give the library's forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model.errors import BatchError
from model.spec import LayerKind, Rewind
from model.trellis import TrellisConfig, TrellisModel, build_model
from model.trellis.errors import ModelConfigError
from model.trellis.presets import PRESETS
from model.trellis.served import ServedTrellis, trellis_spec
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
    served,
)
from tests.unit.trellis.trellis_cases import NANO, some_ids


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> TrellisModel:
    return library(CONFIGS[request.param])


@pytest.mark.parametrize("chunk", [1, 5, 13, 37])
def test_a_prompt_in_pieces_is_the_forward(model: TrellisModel, chunk: int) -> None:
    """Over several windows; a chunk's first row sees what the one before has left."""
    ids, serving, own = some_ids(1, 37, model.config), Serving(model), Reference(model, 1)
    expected = own.prompt(ids)
    assert_logits(serving.prompt(3, ids[0].tolist(), chunk), expected.logits[0])
    assert_held(serving.held(3), own.held())


def test_pieces_beside_decoding_rows(model: TrellisModel) -> None:
    """Sequences in scrambled slots, in another order in each batch, each at its own length."""
    lengths = {4: 42, 0: 23, 5: 30, 2: 9}
    ids = {slot: some_ids(1, length, model.config, seed=slot) for slot, length in lengths.items()}
    own = {slot: Reference(model, 1) for slot in lengths}
    expected = {slot: own[slot].prompt(ids[slot]).logits[0] for slot in lengths}
    serving, done = Serving(model), dict.fromkeys(lengths, 0)
    for plan in (
        [(4, 19)],
        [(0, 7), (4, 1), (2, 1)],
        [(2, 1), (5, 13), (4, 1), (0, 9)],
        [(5, 1), (4, 1), (2, 1), (0, 1)],
        [(4, 14), (2, 4), (0, 1), (5, 11)],
        [(5, 4), (0, 4), (4, 4)],
        [(0, 1), (2, 1), (5, 1), (4, 1)],
        [(2, 1), (4, 1)],
    ):
        parts = [Part(slot, ids[slot][0, done[slot] : done[slot] + rows].tolist()) for slot, rows in plan]
        due = torch.cat([expected[slot][done[slot] : done[slot] + rows] for slot, rows in plan])
        assert_logits(serving.logits(*parts), due)
        for slot, rows in plan:
            done[slot] += rows
    assert done == lengths
    assert_all_held(serving, own)


def test_a_slot_is_used_again() -> None:
    """Nothing of the sequence before is seen, though its blocks keep what was in them."""
    model = library()
    serving = Serving(model)
    serving.prompt(1, some_ids(1, 30, seed=7)[0].tolist())
    serving.free(1)
    ids, own = some_ids(1, 21, seed=8), Reference(model, 1)
    assert_logits(serving.prompt(1, ids[0].tolist(), 8), own.prompt(ids).logits[0])
    assert_held(serving.held(1), own.held())


def test_one_loop_said_and_unsaid_are_one_thing() -> None:
    model, ids = library(), some_ids(2, 15)
    parts = [Part(0, ids[0].tolist()), Part(3, ids[1, :1].tolist())]
    plain, said = Serving(model), Serving(model)
    output = said.step(Turn(parts[0], prompt=True), Turn(parts[1]))
    assert torch.equal(output.logits, plain.logits(*parts))
    assert output.depths == (0, 1)
    assert plain.run(plain.batch([Part(1, [1])]))[0].depths is None
    for slot in (0, 3):
        before, after = plain.held(slot), said.held(slot)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_what_a_forward_is_asked_for() -> None:
    """Rows wanted, hidden states, and what a digest compares: slots read, and the inputs of layer 0."""
    model = library()
    serving, ids = Serving(model), some_ids(2, 12)
    batch = serving.batch([Part(0, ids[0].tolist(), [3, 11]), Part(1, ids[1].tolist(), [])], hidden_rows=True, routing=True)
    output = serving.run(batch)[0]
    with torch.no_grad():
        expected = model(ids, k=1)
        assert_logits(output.logits, expected.logits[0, [3, 11]])
        assert_logits(model.embedding.logits(output.hidden), expected.logits[0, [3, 11]])
    assert torch.equal(output.inputs, model.embedding.weight[ids.flatten()])
    assert_logits(model.apply_readout(output.outputs), expected.logits.flatten(0, 1))
    slots = torch.stack([readout.indices.flatten(0, 1).flatten(1) for readout in expected.bank])
    assert (output.routing.dtype, output.routing.tolist()) == (torch.int32, slots.tolist())
    nothing = serving.run(serving.batch([Part(2, [5, 6], [])]))[0]
    assert (nothing.logits, nothing.routing, nothing.inputs, nothing.outputs) == (None, None, None, None)


def test_rows_of_many_bank_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows look slots up a few at a time."""
    model, ids = library(), some_ids(1, 19)
    monkeypatch.setattr("model.trellis.served.bank.READ_ROWS", 4)
    assert_logits(Serving(model).prompt(0, ids[0].tolist()), Reference(model, 1).prompt(ids).logits[0])


@pytest.mark.parametrize("config", [*CONFIGS.values(), PRESETS["trellis-180m"]], ids=[*CONFIGS, "180m"])
def test_parameters_are_the_library_s(config: TrellisConfig) -> None:
    """Names and shapes, of the value table a share; none is of an auxiliary head, none wants a gradient."""
    whole = {key: tensor.shape for key, tensor in build_model(replace(config, aux=None), device="meta").state_dict().items()}
    for world in (1, 4):
        made = ServedTrellis(config, rank=world - 1, world=world, dtype=torch.bfloat16, device="meta")
        rows, width = whole["bank.values"]
        assert {key: tensor.shape for key, tensor in made.state_dict().items()} == whole | {
            "bank.values": torch.Size((rows // world, width))
        }
        assert all(tensor.is_meta and tensor.dtype == torch.bfloat16 for tensor in made.state_dict().values())
        assert not any(parameter.requires_grad for parameter in made.parameters())


def test_the_spec_of_the_shipped_model() -> None:
    """22 recurrent instances, one sliding cache, two global ones; bytes as the library counts them."""
    spec = trellis_spec(PRESETS["trellis-180m"], (7,))
    assert (spec.architecture, spec.family, spec.num_layers, spec.max_loops) == ("TrellisForCausalLM", "trellis", 10, 4)
    assert (spec.max_positions, spec.eos_token_ids, spec.cut_points, spec.single_chunk) == (4096, (7,), 1, False)
    assert [layer for layer, kind in enumerate(spec.layer_kinds) if kind is not LayerKind.LINEAR] == [1, 5, 9]
    assert [(cache.layer, cache.window) for cache in spec.caches] == [(1, None), (5, 4096), (9, None)]
    assert {(cache.kv_heads, cache.head_dim) for cache in spec.caches} == {(2, 64)}
    assert len(spec.states) == 2 * 22
    assert {state.shape for state in spec.states} == {(2688, 3), (12, 64, 96)}
    assert [state.name for state in spec.states if state.layer == 2] == [
        f"{kind}.{j}" for j in (1, 2, 3, 4) for kind in ("conv", "h")
    ]
    assert [state.name for state in spec.states if state.layer == 8] == ["conv", "h"]
    assert all(state.rewind is Rewind.SNAPSHOT for state in spec.states)
    assert not spec.rewindable
    made = ServedTrellis(PRESETS["trellis-180m"], rank=0, world=1, dtype=torch.float32, device="meta")
    assert made.spec() == trellis_spec(PRESETS["trellis-180m"])


def test_what_is_refused() -> None:
    serving = Serving(library())
    ids = some_ids(1, 64)[0].tolist()
    serving.prompt(0, ids)
    for batch in (
        serving.batch([Part(0, [1])]),
        serving.batch([Part(1, [1])], captures=(2,)),
        serving.batch([Part(1, [1])], written_rows=torch.zeros(0, dtype=torch.int64)),
        serving.batch([Part(1, [1])], positions=torch.zeros(3, 1).int().numpy()),
    ):
        with pytest.raises(BatchError):
            serving.run(batch)
    with pytest.raises(ModelConfigError):
        ServedTrellis(NANO, rank=0, world=3, dtype=torch.float32, device="meta")
    with pytest.raises(ModelConfigError):
        ServedTrellis(replace(NANO, bank_sub_keys=512), rank=0, world=512, dtype=torch.float32, device="meta")
    with pytest.raises(RuntimeError):
        served(library()).bank(0, torch.zeros(1, 1, 64))


@pytest.mark.parametrize(
    "turn",
    [
        prompt_turn(1, torch.zeros(4, dtype=torch.int64), 5),
        decode_turn(0, 1, 0),
        decode_turn(0, 1, 4, depth=5),
        decode_turn(0, 1, 4, thresholds=(0.5,)),
        decode_turn(0, 1, 1, depth=1),
        prompt_turn(0, torch.zeros(4, dtype=torch.int64), 2),
        Turn(Part(0, [1, 2]), most=2),
        Turn(Part(1, [1, 2]), most=2, depth=2, prompt=True),
    ],
    ids=["too many", "none", "deep", "thresholds", "depth of one loop", "rest of a prompt", "two rows", "depth of a prompt"],
)
def test_loops_that_are_refused(turn: Turn) -> None:
    """Before anything is written."""
    serving = Serving(library())
    serving.prompt(0, [3, 1, 4])
    before = serving.held(0)
    with pytest.raises(BatchError, match="span 1"):
        serving.step(decode_turn(2, 1, 4), turn)
    serving.lengths[0] = 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in serving.held(0).items())
