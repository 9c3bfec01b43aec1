"""Sequences divided among the ranks: logits stay transformers', sums are what a row's owner computed, idle rows give nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from kernels.peer_memory import PeerMemory
from model.batch import ForwardBatch, HostBatch, OwnRows
from model.decoder import Decoder
from model.layers.operators import Operators
from tests.support import batches as support
from tests.support.batches import Part, Ranks, relative_error
from tests.support.checkpoints import clear_prompt, hf_logits
from tests.support.state_sections import sections_of
from tests.support.weights import load_rank

Checkpoint = Callable[[str, str], Path]
CASES = [("mixtral", "plain", 2), ("qwen3_next", "plain", 3), ("qwen3_5_moe", "fused", 2), ("llama", "bias", 2)]


def load_owned(path: Path, rank: int, world: int) -> Decoder:
    return load_rank(path, rank, world, owned=True)


def own_rows(ranks: Ranks, parts: Sequence[Part], rank: int, world: int) -> OwnRows:
    """The rows of the parts whose slot is `rank` modulo `world`; the lengths are those after this forward."""
    rows: list[int] = []
    row = 0
    for part in parts:
        if part.slot % world == rank:
            rows += range(row, row + len(part.tokens))
        row += len(part.tokens)
    own = [part for part in parts if part.slot % world == rank]
    if not own:
        return OwnRows(rows=torch.tensor(rows, dtype=torch.int64), batch=None)
    batch = ForwardBatch.from_spans(
        query_lens=[len(part.tokens) for part in own],
        seq_lens=[ranks.lengths[part.slot] for part in own],
        slots=[part.slot for part in own],
        block_tables=[ranks.blocks[part.slot] for part in own],
        kv_write_from=[0] * len(own),
        wanted_rows=[],
        token_ids=torch.zeros(len(rows), dtype=torch.int64),
        block_size=support.BLOCK_SIZE,
        device="cpu",
    )
    return OwnRows(rows=torch.tensor(rows), batch=batch)


def batches(ranks: Ranks, parts: Sequence[Part]) -> list[ForwardBatch]:
    whole = ranks.batch(parts, hidden_rows=True, routing=True)
    return [replace(whole, own=own_rows(ranks, parts, rank, ranks.world)) for rank in range(ranks.world)]


@pytest.mark.parametrize(("family", "variant", "world"), CASES)
def test_logits_and_sums_of_ranks_that_divide_the_sequences(checkpoint: Checkpoint, family: str, variant: str, world: int) -> None:
    path = checkpoint(family, variant)
    ranks = Ranks(path, world, load=load_owned)
    tokens = [clear_prompt(path, length, seed) for length, seed in ((30, 1), (21, 2))]
    steps = [
        [Part(0, tokens[0][:17]), Part(1, tokens[1][:20])],
        [Part(0, tokens[0][17:29])],
        [Part(1, tokens[1][20:]), Part(0, tokens[0][29:])],
    ]
    got: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for parts in steps:
        first, *others = ranks.run(batches(ranks, parts))
        assert first.logits is not None
        for part, rows in zip(parts, first.logits.split([len(part.tokens) for part in parts]), strict=True):
            got[part.slot].append(rows)
        for other in others:
            for name in ("hidden", "routing", "inputs", "outputs"):
                mine, theirs = getattr(first, name), getattr(other, name)
                assert (mine is theirs is None) or torch.equal(mine, theirs), name
    for slot, ids in enumerate(tokens):
        assert relative_error(torch.cat(got[slot]), hf_logits(path, ids)) < 1e-4
    spec = ranks.models[0].spec()
    each = ["reduce"] * (spec.num_layers + len(spec.moe_layers)) + ["gather_to_head"]
    assert all(rank.launched == each * len(steps) for rank in ranks.group.ranks)
    assert [sections_of(state, [0, 1]) for state in ranks.states] == [{}] * world


def test_a_state_is_where_its_sequence_is_and_nowhere_else(checkpoint: Checkpoint) -> None:
    """Bit for bit what a rank alone leaves of the same sequence: its rows are computed as if no other were there."""
    path = checkpoint("qwen3_next", "plain")
    ranks, alone = Ranks(path, 2, load=load_owned), Ranks(path)
    tokens = [clear_prompt(path, length, seed) for length, seed in ((19, 1), (19, 2))]
    parts = [Part(slot, ids) for slot, ids in enumerate(tokens)]
    ranks.run(batches(ranks, parts))
    alone.run(alone.batch(parts))
    for slot in range(2):
        for name in ("conv", "h"):
            here, there = (ranks.states[rank].recurrent(0, name)[slot] for rank in (slot, 1 - slot))
            assert not bool(there.any())
            assert relative_error(here, alone.states[0].recurrent(0, name)[slot]) < 1e-5
        keys, _ = ranks.states[1 - slot].kv(3)
        assert not bool(keys[ranks.blocks[slot]].any())


def test_the_sum_over_ranks_is_exactly_the_owners_row(checkpoint: Checkpoint) -> None:
    """In bfloat16: with the other rank's zeros nothing is rounded once more."""
    path = checkpoint("qwen3_moe", "plain")
    ranks = Ranks(path, 2, dtype=torch.bfloat16, load=lambda p, r, w: load_rank(p, r, w, dtype=torch.bfloat16, owned=True))
    summed: list[tuple[torch.Tensor, torch.Tensor]] = []
    reduce = ranks.group.ranks[0].reduce

    def noting(partial: torch.Tensor) -> torch.Tensor:
        total = reduce(partial)
        summed.append((partial.clone(), total.clone()))
        return total

    ranks.group.ranks[0].reduce = noting  # type: ignore[method-assign]
    ranks.run(batches(ranks, [Part(0, clear_prompt(path, 9, 1)), Part(1, clear_prompt(path, 5, 2))]))
    for partial, total in summed[::2]:
        assert torch.equal(partial[:9], total[:9])
        assert not bool(partial[9:].any())
        assert bool(total[9:].any())


def fused() -> Operators:
    from kernels.tuning import Tuning, TuningTable
    from model.layers.fused import FusedOperators

    return FusedOperators(torch.device("cpu"), Tuning(TuningTable("none", ()), lambda message: None), pdl=False)


def idle_but_own(whole: ForwardBatch, slots: Sequence[int], rank: int, world: int) -> ForwardBatch:
    """A decode batch as a captured step has it: rows of other ranks' sequences have no slot, no length and no place."""
    own = torch.tensor([slot % world == rank for slot in slots])
    nothing = whole.host.query_start[:-1] * 0
    return replace(
        whole,
        slots=torch.where(own, whole.slots, -1),
        seq_lens=torch.where(own, whole.seq_lens, 0),
        kv_places=torch.where(own, whole.kv_places, -1),
        host=HostBatch(whole.host.query_start, nothing, nothing, 1, 64, single_lens=nothing),
    )


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_idle_rows_of_kernels_give_what_rows_left_out_give(
    checkpoint: Checkpoint, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 of 2 alone, whose sums nobody completes, in Triton's interpreter and in torch; llama's attention ends with a bias."""
    monkeypatch.setattr(support, "BLOCK_SIZE", 16)
    path = checkpoint(family, "heads")
    slots = (0, 1, 2, 3)
    tokens = [clear_prompt(path, 8 + slot, slot) for slot in slots]
    prompts = [Part(slot, ids[:-1], []) for slot, ids in zip(slots, tokens, strict=True)]
    last = [Part(slot, ids[-1:]) for slot, ids in zip(slots, tokens, strict=True)]
    found = []
    for operators in (None, fused()):

        def load(path: Path, *_: int, operators: Operators | None = operators) -> Decoder:
            return load_rank(path, 1, 2, operators=operators, owned=True)

        ranks = Ranks(path, load=load)
        assert ranks.models[0].static_decode(16) == (operators is not None)
        ranks.run(replace(ranks.batch(prompts), own=own_rows(ranks, prompts, 1, 2)))
        whole = ranks.batch(last)
        batch = idle_but_own(whole, slots, 1, 2) if operators else replace(whole, own=own_rows(ranks, last, 1, 2))
        (output,) = ranks.run(batch)
        assert output.logits is not None
        found.append(output.logits)
    assert relative_error(found[1], found[0]) < 1e-4


@pytest.mark.parametrize(
    ("world", "busiest", "stay"),
    [(2, 40, True), (4, 19, True), (4, 20, False), (4, 0, True), (8, 10, False)],
)
def test_rows_stay_unless_too_many_are_of_one_rank(world: int, busiest: int, stay: bool) -> None:
    """Of 40 rows in tiles; few rows go in words, whoever owns them, and none stay that do not fit or have no memory."""
    memory = PeerMemory(
        rank=0,
        world=world,
        buffers=torch.zeros(1),
        signals=torch.zeros(1),
        turns=torch.zeros(1),
        abort=torch.zeros(1),
        capacity=64 * 8 * (world - 1) * 10,
        slot=1 << 12,
        word_rows=4,
        two_shots=world > 2,
    )
    x = torch.zeros(40, 64)
    starts = np.array([0, 40], np.int32)
    host = HostBatch(starts, starts[1:], starts[:1], 40, 40)
    batch: Any = SimpleNamespace(decode_only=False, host=host, busiest=busiest)
    comm: Any = SimpleNamespace(peers=memory)
    operators = fused()
    assert operators.rows_stay(batch, comm, x) == stay
    assert operators.rows_stay(batch, comm, x[:4])
    assert not operators.rows_stay(batch, comm, x.repeat(3, 1))
    assert not operators.rows_stay(batch, cast("Any", SimpleNamespace(peers=None)), x)
