"""Batches run one sequence at a time: a bundle's rows, and outputs put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from model.trellis.delta import GdnState
from model.trellis.output import AuxiliaryOutputs, BankReadout, LoopReadout, TrellisOutput
from model.trellis.state import GlobalKV, ModelState, SlidingCache


def row_state(state: ModelState, b: int) -> ModelState:
    """The bundle of sequence b; its global caches are views of the same storage."""
    one = slice(b, b + 1)
    return replace(
        state,
        batch=1,
        gdn=tuple(GdnState(*(part[one] for part in instance)) for instance in state.gdn),
        sliding=tuple(SlidingCache(*(part[one] for part in ring)) for ring in state.sliding),
        global_kv=tuple(
            GlobalKV(cache.k[one], cache.v[one], None if cache.bias is None else cache.bias[one]) for cache in state.global_kv
        ),
    )


def merge_outputs(rows: Sequence[TrellisOutput], before: ModelState | None) -> TrellisOutput:
    """One output of single-sequence ones. `before` is the bundle whose rows they ran on, None where no state was asked for."""
    first = rows[0]
    return replace(
        first,
        logits=torch.cat([row.logits for row in rows]),
        readouts=tuple(_merge_readouts(parts) for parts in zip(*(row.readouts for row in rows), strict=True)),
        exit_logits=None if first.exit_logits is None else torch.cat([_present(row.exit_logits) for row in rows], 1),
        aux=AuxiliaryOutputs({name: torch.cat([row.aux[name] for row in rows]) for name in first.aux}),
        router_masks=_cat_each([row.router_masks for row in rows]),
        router_scores=_cat_each([row.router_scores for row in rows]),
        bank=tuple(_merge_banks(parts) for parts in zip(*(row.bank for row in rows), strict=True)),
        loop_counts=torch.cat([row.loop_counts for row in rows]),
        state=None if before is None else _merge_states([row.state for row in rows], before),
    )


def _merge_readouts(parts: Sequence[LoopReadout]) -> LoopReadout:
    if parts[0].hidden is not None:
        return replace(parts[0], hidden=torch.cat([_present(part.hidden) for part in parts]))
    return replace(parts[0], logits=torch.cat([_present(part.logits) for part in parts]))


def _merge_banks(parts: Sequence[BankReadout]) -> BankReadout:
    return replace(
        parts[0], indices=torch.cat([part.indices for part in parts]), weights=torch.cat([part.weights for part in parts])
    )


def _merge_states(parts: Sequence[ModelState | None], before: ModelState) -> ModelState:
    """The rows' recurrent states and rings, and the storage that they have written into."""
    states = [part for part in parts if part is not None]
    return replace(
        before,
        position=states[0].position,
        gdn=tuple(GdnState(*_cat_each(each)) for each in zip(*(state.gdn for state in states), strict=True)),
        sliding=tuple(SlidingCache(*_cat_each(each)) for each in zip(*(state.sliding for state in states), strict=True)),
    )


def _cat_each(rows: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Field by field over the rows."""
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor
