"""What one call of the sampler does to which rows, decided on the host from plain values (numpy, no tensors).

Rows are grouped into chunks that run the same stages. On a GPU a chunk is every row of its kind, as far as the memory plan allows;
on a CPU, where narrowing a row to its candidates pays and the caches are small, it is one row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ep_runtime.engine.sampling.edits import mask_words
from ep_runtime.engine.sampling.random import row_keys
from protocol.messages import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: their distribution has no second token in float32."""

EDITS = frozenset(("bias_places", "forbidden", "mask_rows", "penalty_rows"))
"""Arguments of a chunk's stages that change logits: one of each stage."""


class Kind(IntEnum):
    """What a row needs."""

    ARGMAX = 0
    """Greedy, from unchanged logits."""
    PLAIN = 1
    """Changed logits, randomness or both, from the whole vocabulary."""
    FILTERED = 2
    """Randomness over what min_p, top_k and top_p leave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotParams:
    """One slot's parameters, in the form the stages use. `penalty_row` is its row in the penalty pool, None without penalties.

    `greedy`: no randomness is used. `kind` is what its rows need at least: see `row_kind`.
    """

    params: SamplingParams
    bias_ids: np.ndarray
    bias_values: np.ndarray
    stop_ids: np.ndarray
    penalty_row: int | None
    greedy: bool
    kind: Kind


def needs_penalties(params: SamplingParams) -> bool:
    """True when the slot's token counts matter."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def slot_params(params: SamplingParams, eos_token_ids: Sequence[int], penalty_row: int | None) -> SlotParams:
    """The slot's parameters; min_tokens forbids end-of-sequence tokens and the request's own stop tokens alike."""
    greedy = params.temperature < GREEDY_BELOW
    filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    edited = bool(params.logit_bias) or penalty_row is not None
    return SlotParams(
        params=params,
        bias_ids=np.array(list(params.logit_bias.keys()), np.int64),
        bias_values=np.array(list(params.logit_bias.values()), np.float32),
        stop_ids=np.unique(np.array([*eos_token_ids, *params.stop_token_ids], np.int64)),
        penalty_row=penalty_row,
        greedy=greedy,
        kind=Kind.ARGMAX if greedy and not edited else Kind.PLAIN if greedy or not filtered else Kind.FILTERED,
    )


def row_kind(slot: SlotParams, index: int, mask: bytes | None) -> Kind:
    """The stages that a row needs at generated index `index`: a mask and min_tokens change logits, too."""
    if (mask is not None or index < slot.params.min_tokens) and slot.kind is Kind.ARGMAX:
        return Kind.PLAIN
    return slot.kind


def changes_logits(slot: SlotParams, index: int, mask: bytes | None) -> bool:
    """True when an edit changes the row's logits."""
    return len(slot.bias_ids) > 0 or index < slot.params.min_tokens or mask is not None or slot.penalty_row is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Rows that run the same stages, and the stages' arguments by name; a stage without arguments is skipped.

    `rows` [w] int64 are places in the batch; other row numbers and flat places count within the chunk.
    """

    kind: Kind
    members: tuple[int, ...]
    arrays: dict[str, np.ndarray]


def group_rows(kinds: Sequence[Kind], one_by_one: bool, at_once: int) -> list[tuple[Kind, tuple[int, ...]]]:
    """Row places by kind, in a fixed order, at most `at_once` together; with `one_by_one` all but ARGMAX rows are alone."""
    groups: list[tuple[Kind, tuple[int, ...]]] = []
    for kind in Kind:
        if kind not in kinds:
            continue
        members = tuple([row for row, its in enumerate(kinds) if its is kind])
        most = 1 if one_by_one and kind != Kind.ARGMAX else at_once
        groups.extend((kind, members[start : start + most]) for start in range(0, len(members), most))
    return groups


def plan_chunks(
    slots: Sequence[SlotParams],
    indices: Sequence[int],
    masks: Sequence[bytes | None],
    vocab_size: int,
    one_by_one: bool,
    at_once: int,
) -> list[Chunk]:
    """The chunks of one call over rows with these parameters, generated indices and grammar masks, of at most `at_once` rows."""
    kinds = [row_kind(slot, index, mask) for slot, index, mask in zip(slots, indices, masks, strict=True)]
    chunks = []
    for kind, members in group_rows(kinds, one_by_one, at_once):
        arrays = {"rows": np.array(members, np.int64)}
        if kind != Kind.ARGMAX:
            own = [slots[row] for row in members]
            own_indices = [indices[row] for row in members]
            _plan_edits(arrays, own, own_indices, [masks[row] for row in members], vocab_size)
            _plan_penalties(arrays, own)
            _plan_draw(arrays, own, own_indices)
        if kind == Kind.FILTERED:
            _plan_filters(arrays, [slots[row].params for row in members], vocab_size)
        chunks.append(Chunk(kind=kind, members=members, arrays=arrays))
    return chunks


def _plan_edits(
    arrays: dict[str, np.ndarray], slots: list[SlotParams], indices: list[int], masks: list[bytes | None], vocab_size: int
) -> None:
    biased = [row for row, slot in enumerate(slots) if len(slot.bias_ids)]
    if biased:
        arrays["bias_places"] = np.concatenate([row * vocab_size + slots[row].bias_ids for row in biased])
        arrays["bias_values"] = np.concatenate([slots[row].bias_values for row in biased])
    early = [row for row, slot in enumerate(slots) if indices[row] < slot.params.min_tokens and len(slot.stop_ids)]
    if early:
        arrays["forbidden"] = np.concatenate([row * vocab_size + slots[row].stop_ids for row in early])
    masked = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    if masked:
        arrays["mask_rows"] = np.array([row for row, _ in masked], np.int64)
        arrays["mask_words"] = np.stack([mask_words(mask, vocab_size) for _, mask in masked])


def _column(values: Sequence[float], dtype: type = np.float32) -> np.ndarray:
    return np.array(values, dtype).reshape(-1, 1)


def _plan_penalties(arrays: dict[str, np.ndarray], slots: list[SlotParams]) -> None:
    penalised = [(row, slot.penalty_row, slot.params) for row, slot in enumerate(slots) if slot.penalty_row is not None]
    if penalised:
        arrays["penalty_rows"] = np.array([row for row, _, _ in penalised], np.int64)
        arrays["penalty_pool"] = np.array([pool for _, pool, _ in penalised], np.int64)
        arrays["repetition"] = _column([params.repetition_penalty for _, _, params in penalised])
        arrays["presence"] = _column([params.presence_penalty for _, _, params in penalised])
        arrays["frequency"] = _column([params.frequency_penalty for _, _, params in penalised])


def _plan_draw(arrays: dict[str, np.ndarray], slots: list[SlotParams], indices: list[int]) -> None:
    if all(slot.greedy for slot in slots):
        return
    arrays["temperature"] = _column([1.0 if slot.greedy else slot.params.temperature for slot in slots])
    arrays["noise"] = _column([0.0 if slot.greedy else 1.0 for slot in slots])
    arrays["keys"] = row_keys([slot.params.seed for slot in slots], indices)


def _plan_filters(arrays: dict[str, np.ndarray], rows: list[SamplingParams], vocab_size: int) -> None:
    if any(params.min_p > 0.0 for params in rows):
        arrays["log_min_p"] = _column([math.log(params.min_p) if params.min_p > 0.0 else -math.inf for params in rows])
    if any(params.top_k > 0 or params.top_p < 1.0 for params in rows):
        arrays["top_k"] = _column([params.top_k if 0 < params.top_k < vocab_size else vocab_size for params in rows], np.int64)
        arrays["top_p"] = _column([params.top_p if params.top_p < 1.0 else math.inf for params in rows], np.float64)
