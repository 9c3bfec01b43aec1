"""What ranks run in the tests of decoders whose rows stay with their owners: kernels in the interpreter, over files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model.batch import ForwardBatch
from tests.distributed.comm_cases import _group, exchange_of
from tests.distributed.one_shot_cases import _memory
from tests.support import batches as support
from tests.support.batches import Part, Ranks
from tests.support.rank_context import RankContext
from tests.support.weights import load_rank
from tests.unit.model.test_own_sequences import fused, idle_but_own, own_rows

BLOCK_SIZE = 16
"""The kernels take no smaller ones."""


@contextmanager
def unusable_memory() -> Iterator[None]:
    """What nobody has written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def forwards(
    ctx: RankContext, *, folder: str, steps: Sequence[Sequence[tuple[int, list[int]]]], ways: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Steps of spans (slot, tokens), all rows wanted, by sums and by owners: logits, hidden rows, collectives; a step's way is
    "batch", "captured" (single rows, those of others idle) or "captures" (of the first layer)."""
    support.BLOCK_SIZE, before = BLOCK_SIZE, support.BLOCK_SIZE
    try:
        with closing(_group(ctx, shared=True)) as group:
            exchange = exchange_of(ctx)
            memory, _held = _memory(ctx, exchange, "rows", torch.float32, 2, 32, "thread", 3, ctx.world > 2)
            group.peers = memory
            found: dict[str, list[dict[str, Any]]] = {}
            for moves in ("sums", "owners"):
                with unusable_memory() if moves == "owners" else torch.no_grad():
                    found[moves] = _run(ctx, Path(folder), steps, ways, group, moves == "owners")
            exchange(b"")  # nobody leaves while another still moves rows
            return found
    finally:
        support.BLOCK_SIZE = before


def _run(
    ctx: RankContext,
    folder: Path,
    steps: Sequence[Sequence[tuple[int, list[int]]]],
    ways: Sequence[str],
    group: Any,
    stay: bool,
) -> list[dict[str, Any]]:
    def load(path: Path, *_: int) -> Any:
        return load_rank(path, ctx.rank, ctx.world, operators=fused(), owned=True)

    ranks = Ranks(folder, load=load)
    found = []
    for spans, way in zip(steps, ways, strict=True):
        parts = [Part(slot, tokens) for slot, tokens in spans]
        batch = _batch(ranks, parts, way, ctx.rank, ctx.world)
        if stay:
            owners = [part.slot % ctx.world for part in parts]
            batch.row_owner = torch.from_numpy(np.repeat(owners, [len(part.tokens) for part in parts]))
        launched = group.launched
        with torch.inference_mode():
            output = ranks.models[0](batch, ranks.states[0], group)
        results = {"logits": output.logits, "hidden": output.hidden, "captured": output.captures.get(0)}
        named: dict[str, Any] = {name: value.numpy() for name, value in results.items() if value is not None}
        found.append(named | {"launched": group.launched - launched})
    return found


def _batch(ranks: Ranks, parts: list[Part], way: str, rank: int, world: int) -> ForwardBatch:
    whole = ranks.batch(parts, hidden_rows=True, captures=(0,) if way == "captures" else ())
    if way == "captured":
        return idle_but_own(whole, [part.slot for part in parts], rank, world)
    return replace(whole, own=own_rows(ranks, parts, rank, world))
