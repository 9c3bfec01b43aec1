"""What a captured step launches, once, in the interpreter: the logits of the same step as a batch, beside idle rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ep_runtime.engine.block_tables import BlockTables
from ep_runtime.engine.graphs import FIELDS, IDLE, DecodeGraphs, FixedRows
from model.base import SingleRank
from tests.support import batches
from tests.support.batches import Part, Ranks
from tests.support.checkpoints import clear_prompt
from tests.unit.model.test_fused_operators import load_fused

ROWS = 4
BLOCK_SIZE = 16
"""The kernels take no smaller ones."""


def test_a_captured_step_is_the_same_step(checkpoint: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BLOCK_SIZE", BLOCK_SIZE)
    path = checkpoint("llama", "heads")
    tokens = clear_prompt(path, 30)
    slots, lengths = (4, 1), (2, 17)
    alike = [Ranks(path, load=load_fused) for _ in range(2)]
    for ranks in alike:
        for slot, length in zip(slots, lengths, strict=True):
            ranks.prompt(slot, tokens[:length])
    expected = alike[0].run(alike[0].batch([Part(4, tokens[2:3]), Part(1, tokens[17:18])], routing=True))[0]

    ranks = alike[1]
    ranks.batch([Part(4, tokens[2:3]), Part(1, tokens[17:18])])  # takes the blocks
    tables = BlockTables(6, 25, torch.device("cpu"))
    for slot in slots:
        tables.tensor[slot, : len(ranks.blocks[slot])] = torch.tensor(ranks.blocks[slot], dtype=torch.int32)
    last_tokens = torch.full((6,), 3)
    last_tokens[1] = tokens[17]
    graphs = DecodeGraphs(
        ranks.models[0], ranks.states[0], SingleRank(), tables, last_tokens, block_size=BLOCK_SIZE, max_length=25 * BLOCK_SIZE
    )
    places = [ranks.blocks[slot][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for slot, at in zip(slots, lengths, strict=True)]
    columns = {"given": [tokens[2], 0], "fed": [-1, 1], "position": lengths, "slot": slots, "length": [3, 18], "place": places}
    columns["owner"] = (0, 0)
    inputs = torch.tensor([[*columns[name], *[IDLE[name]] * (ROWS - 2)] for name in FIELDS])
    with torch.inference_mode():
        output = graphs.forward(inputs, FixedRows.of(ROWS, tables.width, torch.device("cpu")))
    assert output.left is not None
    assert expected.logits is not None
    got = output.left.upto(2)
    torch.testing.assert_close(got.pick(torch.arange(2)), expected.logits, rtol=1e-4, atol=1e-4)
    assert got.best.tolist() == [[token, 0] for token in expected.logits.argmax(1).tolist()]
    assert output.inputs is not None
    assert expected.inputs is not None
    assert torch.equal(output.inputs[:2], expected.inputs)
