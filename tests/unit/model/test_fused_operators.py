"""The layers' GPU kernels, in Triton's interpreter, give the logits of transformers: whole prompts, pieces beside decode rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.decoder import Decoder
from tests.support.batches import Part, Ranks, relative_error
from tests.support.checkpoints import clear_prompt, hf_logits
from tests.support.weights import load_rank

CASES = [("mixtral", "window"), ("qwen3_moe", "yarn"), ("qwen3_next", "plain"), ("qwen3_5_moe", "fused"), ("llama", "llama3")]


def load_fused(path: Path, rank: int, world: int, *, split: bool = False) -> Decoder:
    """The model with GPU kernels. One rank only: the interpreter is not made for threads."""
    from kernels.tuning import Tuning, TuningTable
    from model.layers.fused import FusedOperators

    untuned = Tuning(TuningTable("none", ()), lambda message: None)
    return load_rank(path, rank, world, operators=FusedOperators(torch.device("cpu"), untuned, pdl=False), split=split)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_kernels_give_the_logits_of_the_reference(checkpoint: Callable[[str, str], Path], family: str, variant: str) -> None:
    path = checkpoint(family, variant)
    ranks = Ranks(path, load=load_fused)
    first, second, third = (clear_prompt(path, length, seed) for length, seed in ((39, 1), (19, 2), (3, 3)))
    expected = [hf_logits(path, tokens) for tokens in (first, second, third)]
    assert relative_error(ranks.prompt(0, first[:36], chunk=21), expected[0][:36]) < 1e-4
    ranks.prompt(2, third[:1])
    # Two rows that decode around a piece, then three that decode.
    rows = ranks.logits(Part(0, first[36:37], [0]), Part(1, second[:17], [16]), Part(2, third[1:2], [0]))
    for row, (slot, position) in zip(rows, ((0, 36), (1, 16), (2, 1)), strict=True):
        assert relative_error(row, expected[slot][position]) < 1e-4, slot
    rows = ranks.logits(Part(2, third[2:3], [0]), Part(0, first[37:38], [0]), Part(1, second[17:18], [0]))
    for row, (slot, position) in zip(rows, ((2, 2), (0, 37), (1, 17)), strict=True):
        assert relative_error(row, expected[slot][position]) < 1e-4, slot


@pytest.mark.parametrize(("family", "variant"), [("mixtral", "window"), ("llama", "llama3")])
def test_logits_that_are_left_are_those_that_are_gathered(
    checkpoint: Callable[[str, str], Path], family: str, variant: str
) -> None:
    """Tied heads and others. The embeddings that entered the first layer are kept beside."""
    path = checkpoint(family, variant)
    tokens = clear_prompt(path, 24)
    outputs = []
    for leave in (False, True):
        ranks = Ranks(path, load=load_fused)
        ranks.prompt(0, tokens[:2])
        ranks.prompt(1, tokens[7:10])
        batch = ranks.batch([Part(1, tokens[10:11]), Part(0, tokens[2:3])], leave_logits=leave, routing=True)
        outputs += ranks.run(batch)
    (gathered, left) = outputs
    assert gathered.logits is not None
    assert left.logits is None
    assert left.left is not None
    assert torch.equal(left.left.pick(torch.tensor([1, 0])), gathered.logits.flip(0))
    assert left.left.best.tolist() == [[token, 0] for token in gathered.logits.argmax(1).tolist()]
    assert left.inputs is not None
    assert gathered.inputs is not None
    assert torch.equal(left.inputs, gathered.inputs)


@pytest.mark.parametrize(("family", "world"), [("qwen3_5", 4), ("qwen3", 4), ("mixtral", 2)])
def test_kernels_take_the_sizes_of_a_rank_that_has_a_part_of_the_heads(
    checkpoint: Callable[[str, str], Path], family: str, world: int
) -> None:
    """The last rank alone, whose partial sums nobody completes, beside the torch form of the same."""
    path = checkpoint(family, "heads")
    tokens = clear_prompt(path, 24)

    def logits(fused: bool) -> torch.Tensor:
        def load(path: Path, rank: int, _: int) -> Decoder:
            return load_fused(path, world - 1, world, split=True) if fused else load_rank(path, world - 1, world, split=True)

        ranks = Ranks(path, load=load)
        return torch.cat([ranks.prompt(0, tokens[:21], chunk=17), *(ranks.logits(Part(0, [token])) for token in tokens[21:])])

    assert relative_error(logits(fused=True), logits(fused=False)) < 1e-4
