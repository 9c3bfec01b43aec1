"""Experts and vocabulary over several ranks: the logits stay, and ranks agree in every bit and every collective."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.batches import Part, Ranks, relative_error
from tests.support.checkpoints import clear_prompt, hf_logits, prompt

CASES = [
    ("mixtral", "plain"),
    ("mixtral", "all"),
    ("qwen3_moe", "yarn"),
    ("qwen3_next", "mixed"),
    ("qwen3_5_moe", "fused"),
    ("llama", "llama3"),
]


@pytest.mark.parametrize(("family", "variant"), CASES, ids=lambda value: str(value))
@pytest.mark.parametrize("world", [2, 3, 4])
def test_logits_of_several_ranks(checkpoint: Callable[[str, str], Path], family: str, variant: str, world: int) -> None:
    path = checkpoint(family, variant)
    ranks = Ranks(path, world)
    tokens = clear_prompt(path, 65)
    got = ranks.prompt(0, tokens[:50], chunk=19)
    rest = [ranks.logits(Part(0, [token])) for token in tokens[50:]]
    assert relative_error(torch.cat([got, *rest]), hf_logits(path, tokens)) < 1e-4


@pytest.mark.parametrize("world", [2, 7, 12])
def test_ranks_agree_bit_by_bit(checkpoint: Callable[[str, str], Path], world: int) -> None:
    """Also where a rank has no expert (12 ranks, 10 experts) and where the rows reach none of its experts."""
    path = checkpoint("qwen3_moe", "plain")
    ranks = Ranks(path, world)
    moe_layers = len(ranks.models[0].spec().moe_layers)
    for parts in ([Part(0, prompt(30)), Part(1, prompt(1))], [Part(1, prompt(1, 1))], [Part(0, prompt(1)), Part(1, prompt(1, 2))]):
        outputs = ranks.run(ranks.batch(parts, hidden_rows=True, routing=True))
        for output in outputs[1:]:
            assert output.hidden is not None
            assert outputs[0].hidden is not None
            assert torch.equal(output.hidden, outputs[0].hidden)
            assert output.routing is not None
            assert outputs[0].routing is not None
            assert torch.equal(output.routing, outputs[0].routing)
    for first, *caches in zip(*(state.kv(1) for state in ranks.states), strict=True):
        assert all(torch.equal(cache, first) for cache in caches)
    for rank in ranks.group.ranks:
        assert rank.launched == (["reduce"] * moe_layers + ["gather_to_head"]) * 3


def test_no_head_collective_without_wanted_rows(checkpoint: Callable[[str, str], Path]) -> None:
    ranks = Ranks(checkpoint("mixtral", "window"), 2)
    ranks.run(ranks.batch([Part(0, prompt(9), [])]))
    assert [rank.launched for rank in ranks.group.ranks] == [["reduce"]] * 2


def test_vocabulary_smaller_than_the_world_times_its_shard(checkpoint: Callable[[str, str], Path]) -> None:
    """131 rows over 14 ranks: shards of 10, the last of one row."""
    path = checkpoint("llama", "plain")
    assert relative_error(Ranks(path, 14).prompt(0, prompt(5)), hf_logits(path, prompt(5))) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("family", "variant"), [("mixtral", "all"), ("qwen3_moe", "plain"), ("qwen3_5_moe", "plain")], ids=lambda value: str(value)
)
def test_half_precision_runs_close_to_float32(
    checkpoint: Callable[[str, str], Path], family: str, variant: str, dtype: torch.dtype
) -> None:
    """Half of the logits stay within a few roundings; others may follow another expert."""
    path = checkpoint(family, variant)
    tokens = clear_prompt(path, 40)
    ranks = Ranks(path, 2, dtype=dtype)
    got = torch.cat([ranks.prompt(0, tokens[:35]), *(ranks.logits(Part(0, [token])) for token in tokens[35:])])
    expected = hf_logits(path, tokens)
    assert got.dtype == torch.float32
    assert float((got - expected).abs().median() / expected.abs().median()) < 0.1
