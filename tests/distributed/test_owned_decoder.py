"""Decoders whose rows stay with their owners: transformers' logits, and the bits that sums of all rows give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from model.config import ModelConfig
from tests.support.batches import relative_error
from tests.support.checkpoints import clear_prompt, hf_logits
from tests.support.ranks import RankPool
from tests.support.weights import placed

PATIENCE_S = 480.0
"""See `test_one_shot`."""

Checkpoint = Callable[[str, str], Path]

STEPS = [
    ([(0, 0, 7), (2, 0, 1)], "batch"),
    ([(1, 0, 3), (0, 7, 8)], "batch"),
    ([(1, 3, 4), (2, 1, 2), (0, 8, 9)], "captured"),
    ([(0, 9, 10), (2, 2, 4)], "captures"),
]
"""Spans of a step: slot, first token, last. Of two ranks one has no row of the first; three rows go in words, more in tiles."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is chosen where there is no GPU")
@pytest.mark.parametrize(
    ("family", "world", "count"),
    [
        ("mixtral", 2, 3),
        pytest.param("mixtral", 3, 4, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, 4, marks=pytest.mark.slow),
    ],
)
def test_rows_that_stay_give_the_bits_of_sums(ranks: RankPool, checkpoint: Checkpoint, family: str, world: int, count: int) -> None:
    path = checkpoint(family, "heads")
    tokens = [clear_prompt(path, length, seed) for length, seed in ((10, 1), (4, 2), (4, 3))]
    steps = [[(slot, tokens[slot][first:last]) for slot, first, last in spans] for spans, _ in STEPS[:count]]
    run = {"folder": str(path), "steps": steps, "ways": [way for _, way in STEPS[:count]]}
    found = ranks.run(world, "tests.distributed.owned_decoder_cases:forwards", **run, deadline=PATIENCE_S)
    config, _ = placed(path, world)
    assert isinstance(config, ModelConfig)
    # Beside a dense MLP the norm is another kernel's, which adds in another order.
    alike = len(config.moe_layers) == len(config.layers)
    moves = 2 * len(config.moe_layers) + 1
    expected = [hf_logits(path, ids) for ids in tokens]
    for number, (spans, way) in enumerate(STEPS[:count]):
        exact = torch.cat([expected[slot][first:last] for slot, first, last in spans])
        head = found[0]["owners"][number]
        logits = torch.from_numpy(head["logits"])
        assert relative_error(logits, exact) < 1e-4, number
        assert torch.equal(logits.argmax(1), exact.argmax(1)), number
        for rank in range(world):
            got, sums = found[rank]["owners"][number], found[rank]["sums"][number]
            # One more gathers the logits; a step that captures takes sums.
            assert got["launched"] == (sums["launched"] if way == "captures" else moves + 1), number
            assert got.keys() == sums.keys()
            for name in got.keys() - {"launched"}:
                assert name == "logits" or np.array_equal(got[name], head[name]), (number, name)
                assert np.array_equal(got[name], sums[name]) if alike else np.allclose(got[name], sums[name], 0, 1e-4), (
                    number,
                    name,
                )
