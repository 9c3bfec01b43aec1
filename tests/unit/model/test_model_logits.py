"""Every family's logits against transformers', however a prompt is cut and whatever shares its batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.batch import ForwardBatch
from tests.support.batches import BLOCK_SIZE, Part, Ranks, relative_error
from tests.support.checkpoints import CASES, CLEAR_MARGIN, clear_prompt, hf_logits, prompt, routing_margin

LENGTHS = (1, 2, 63, 64, 65, 200)
TOLERANCE = 1e-4

every_case = pytest.mark.parametrize(("family", "variant"), CASES, ids=lambda value: str(value))


@every_case
def test_whole_prompts(checkpoint: Callable[[str, str], Path], family: str, variant: str) -> None:
    path = checkpoint(family, variant)
    ranks = Ranks(path)
    for length in LENGTHS:
        tokens = clear_prompt(path, length)
        assert relative_error(ranks.prompt(0, tokens), hf_logits(path, tokens)) < TOLERANCE, length
        ranks.free(0)


@every_case
@pytest.mark.parametrize("chunk", [1, 7, 64, 67])
def test_chunks_that_divide_nothing(checkpoint: Callable[[str, str], Path], family: str, variant: str, chunk: int) -> None:
    path = checkpoint(family, variant)
    tokens = clear_prompt(path, 80 if chunk == 1 else 200)
    assert relative_error(Ranks(path).prompt(0, tokens, chunk), hf_logits(path, tokens)) < TOLERANCE


@every_case
def test_all_prompts_in_one_batch(checkpoint: Callable[[str, str], Path], family: str, variant: str) -> None:
    path = checkpoint(family, variant)
    prompts = [clear_prompt(path, length) for length in LENGTHS]
    got = Ranks(path).logits(*(Part(slot, tokens) for slot, tokens in enumerate(prompts)))
    for rows, tokens in zip(got.split(LENGTHS), prompts, strict=True):
        assert relative_error(rows, hf_logits(path, tokens)) < TOLERANCE, len(tokens)


@every_case
def test_finishing_prefills_beside_decode_rows(checkpoint: Callable[[str, str], Path], family: str, variant: str) -> None:
    """Two and three pieces that end their prompts, between rows that decode: each row has its own sequence's distribution."""
    path = checkpoint(family, variant)
    ranks = Ranks(path)
    sequences = [clear_prompt(path, length, seed) for length, seed in ((36, 1), (73, 2), (44, 3), (69, 4), (5, 5))]
    for slot, done in ((0, 32), (1, 60), (2, 40), (3, 20)):
        ranks.prompt(slot, sequences[slot][:done], chunk=23)
    # Slots 0 to 3 end their prompts here, three rows before what is left for decoding.
    ends = [33, 70, 41, 66]
    got = ranks.logits(
        Part(3, sequences[3][20:66], [45]),
        Part(0, sequences[0][32:33]),
        Part(1, sequences[1][60:70], [9]),
        Part(2, sequences[2][40:41]),
    )
    expected = [hf_logits(path, tokens) for tokens in sequences]
    for row, slot in zip(got, (3, 0, 1, 2), strict=True):
        assert relative_error(row, expected[slot][ends[slot] - 1]) < TOLERANCE, slot
    order = (2, 0, 4, 3, 1)
    for step in range(3):
        fed = [sequences[slot][ends[slot] + step :][:1] for slot in range(4)]
        fed.append(sequences[4][step : step + 1] if step < 2 else sequences[4][2:])
        got = ranks.logits(*(Part(slot, fed[slot], [len(fed[slot]) - 1]) for slot in order))
        for row, slot in zip(got, order, strict=True):
            position = ends[slot] + step if slot < 4 else (0, 1, 4)[step]
            assert relative_error(row, expected[slot][position]) < TOLERANCE, (step, slot)


@every_case
def test_greedy_decoding(checkpoint: Callable[[str, str], Path], family: str, variant: str) -> None:
    """Tokens chosen step by step, two sequences at a time, are transformers' choices for what was there before."""
    path = checkpoint(family, variant)
    ranks = Ranks(path)
    sequences = [clear_prompt(path, 30, 1), clear_prompt(path, 62, 2)]
    logits = ranks.logits(*(Part(slot, tokens, [len(tokens) - 1]) for slot, tokens in enumerate(sequences)))
    for _ in range(12):
        for tokens, row in zip(sequences, logits, strict=True):
            tokens.append(int(row.argmax()))
        logits = ranks.logits(*(Part(slot, tokens[-1:]) for slot, tokens in enumerate(sequences)))
    for tokens, length in zip(sequences, (30, 62), strict=True):
        expected = hf_logits(path, tokens)[length - 1 : -1]
        assert routing_margin(path, tokens) > CLEAR_MARGIN, "a near tie between experts; choose another seed"
        assert tokens[length:] == expected.argmax(-1).tolist()


def test_shared_blocks_are_not_written(checkpoint: Callable[[str, str], Path]) -> None:
    """Rows below `kv_write_from` attend to what the cache holds at their places; nothing there changes."""
    ranks = Ranks(checkpoint("llama", "plain"))
    tokens = prompt(20)
    whole = ranks.prompt(0, tokens)
    before = [tuple(cache.clone() for cache in ranks.states[0].kv(layer)) for layer in range(2)]
    batch = ForwardBatch.from_spans(
        query_lens=[5],
        seq_lens=[20],
        slots=[0],
        block_tables=[ranks.blocks[0]],
        kv_write_from=[16],
        wanted_rows=[4],
        # Another token at position 15, in a block that is shared: only its own row may notice.
        token_ids=torch.tensor([7, *tokens[16:]]),
        block_size=BLOCK_SIZE,
        device="cpu",
    )
    assert batch.written_rows is not None
    assert batch.written_rows.tolist() == [1, 2, 3, 4]
    (output,) = ranks.run(batch)
    assert output.logits is not None
    assert relative_error(output.logits[0], whole[-1]) < TOLERANCE
    for layer, caches in enumerate(before):
        for now, then in zip(ranks.states[0].kv(layer), caches, strict=True):
            assert torch.equal(now[ranks.blocks[0][:2]], then[ranks.blocks[0][:2]])


def test_outputs_of_wanted_rows(checkpoint: Callable[[str, str], Path]) -> None:
    ranks = Ranks(checkpoint("qwen3_moe", "mixed"))
    tokens = prompt(9)
    (all_rows,) = ranks.run(ranks.batch([Part(0, tokens)], hidden_rows=True, captures=(1, 4), routing=True))
    (some,) = ranks.run(ranks.batch([Part(1, tokens, [2, 8])], hidden_rows=True, captures=(4,), routing=True))
    (none,) = ranks.run(ranks.batch([Part(2, tokens, [])]))
    assert all_rows.logits is not None
    assert all_rows.hidden is not None
    assert some.logits is not None
    assert some.hidden is not None
    assert relative_error(some.logits, all_rows.logits[[2, 8]]) < 1e-5
    assert relative_error(some.hidden, all_rows.hidden[[2, 8]]) < 1e-5
    assert sorted(all_rows.captures) == [1, 4]
    assert relative_error(some.captures[4], all_rows.captures[4][[2, 8]]) < 1e-5
    model = ranks.models[0]
    with torch.inference_mode():
        assert torch.equal(model.norm(all_rows.captures[4]), all_rows.hidden)
    assert all_rows.routing is not None
    assert (tuple(all_rows.routing.shape), all_rows.routing.dtype) == ((len(model.spec().moe_layers), 9, 3), torch.int32)
    assert some.routing is not None
    assert torch.equal(some.routing, all_rows.routing)
    assert (none.logits, none.hidden, none.routing, none.captures) == (None, None, None, {})
