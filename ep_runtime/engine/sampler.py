"""Chooses each row's next token on the head, from logits, per-slot parameters and counter-based randomness.

Order of processing: logit_bias, min_tokens, grammar mask, repetition, presence and frequency penalties, temperature, min_p, top_k,
top_p, then the draw. Greedy rows stop before temperature. Log-probabilities are of the unprocessed logits. A row's token depends on
its logits, its parameters, its generated index and its token history, never on the rows beside it, so replay gives it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import torch

from ep_runtime.engine.sampling import edits, filters
from ep_runtime.engine.sampling.checks import sampling_fault
from ep_runtime.engine.sampling.logprobs import LogprobRows, logprob_rows
from ep_runtime.engine.sampling.penalties import PenaltyPool
from ep_runtime.engine.sampling.plan import (
    EDITS,
    Chunk,
    Kind,
    SlotParams,
    changes_logits,
    needs_penalties,
    plan_chunks,
    slot_params,
)
from ep_runtime.engine.sampling.random import log_exponential, token_words
from ep_runtime.engine.staging import download, upload
from model.scratch import SAMPLED_AT_ONCE
from protocol.messages import SamplingParams

if TYPE_CHECKING:
    from ep_runtime.engine.sampling.fused import FusedDraw
    from kernels.shards_triton import LeftLogits

UNCHANGED_AT_ONCE = 16
"""Times the rows: a logit that no edit changes takes 4 bytes of the kernel at most (a copy), where edits take SAMPLER_BYTES."""


class RowStatus(IntEnum):
    """Whether a row's token may be used."""

    OK = 0
    EMPTY = 1
    """Mask, bias and min_tokens together leave no token; the token is 0."""
    NOT_FINITE = 2
    """The logits hold NaN or +inf; the token is 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What one call gave W rows, on the device or (after `to_host_async` and its event) on the host."""

    tokens: torch.Tensor
    """[W] int64"""
    status: torch.Tensor
    """[W] int32 or int64, `RowStatus` values."""
    logprobs: LogprobRows | None = None
    """Of the rows `logprob_rows`, in that order; None when no row asked."""
    logprob_rows: tuple[int, ...] = ()
    logprob_counts: tuple[int, ...] = ()
    both: torch.Tensor | None = None
    """[W, 2], if tokens and status are its columns: then they move in one copy."""

    def to_host_async(self) -> Sampled:
        """The same in pinned host memory, by asynchronous copies: valid after an event recorded behind this call."""
        both = None if self.both is None else download(self.both)
        return Sampled(
            tokens=download(self.tokens) if both is None else both[:, 0],
            status=download(self.status) if both is None else both[:, 1],
            logprobs=None if self.logprobs is None else self.logprobs.to_host_async(),
            logprob_rows=self.logprob_rows,
            logprob_counts=self.logprob_counts,
        )


class Sampler:
    """Sampling state of every slot, and the stages. Nothing in `sample` waits for a GPU.

    `one_by_one` (default: on CPUs) runs rows that need more than an argmax singly, narrowed to the tokens that filters can leave.
    `fused` (default: on CUDA devices) draws by one kernel, which only reads logits that no edit changes.
    """

    def __init__(
        self,
        vocab_size: int,
        max_slots: int,
        device: torch.device | str,
        eos_token_ids: tuple[int, ...],
        *,
        one_by_one: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_slots = max_slots
        self.device = torch.device(device)
        self.eos_token_ids = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)
        self.one_by_one = self.device.type == "cpu" if one_by_one is None else one_by_one
        self._slots: dict[int, SlotParams] = {}
        self._at_once = max(1, SAMPLED_AT_ONCE[self.device.type] // vocab_size)
        self._penalties = PenaltyPool(vocab_size, max_slots, self.device)
        self._words = token_words(vocab_size, self.device)
        self._fused: FusedDraw | None = None
        if self.device.type == "cuda" if fused is None else fused:
            from ep_runtime.engine.sampling.fused import FusedDraw

            self._fused = FusedDraw(vocab_size, max_slots, self.device)

    def start(self, slot: int, params: SamplingParams, prompt: list[int], generated: list[int]) -> None:
        """Give the slot its parameters and token history, whatever it had before. ValueError for what `sampling_fault` refuses."""
        if not 0 <= slot < self.max_slots:
            raise ValueError(f"slot {slot} is not in 0..{self.max_slots - 1}")
        fault = sampling_fault(params, prompt, generated, self.vocab_size)
        if fault is not None:
            raise ValueError(fault)
        if slot in self._slots:
            self.stop(slot)
        row = self._penalties.take(prompt, generated) if needs_penalties(params) else None
        self._slots[slot] = slot_params(params, self.eos_token_ids, row)

    def stop(self, slot: int) -> None:
        """Forget the slot. KeyError for one that was not started."""
        row = self._slots.pop(slot).penalty_row
        if row is not None:
            self._penalties.give(row)

    def check_integrity(self) -> None:
        """Penalty rows and the slots that hold them agree."""
        self._penalties.check_integrity()
        held = [row.penalty_row for row in self._slots.values() if row.penalty_row is not None]
        if len(held) != len(set(held)) or not self._penalties.taken.issuperset(held) or len(self._penalties.taken) != len(held):
            raise AssertionError(f"slots hold penalty rows {sorted(held)}, the pool gave {sorted(self._penalties.taken)}")

    def sample(
        self,
        logits: torch.Tensor | LeftLogits,
        slots: Sequence[int],
        indices: Sequence[int],
        masks: Sequence[bytes | None],
    ) -> Sampled:
        """The next token of slot `slots[i]` from row i of `logits` [W, V] float32, which is left as it is.

        Of logits that were left on their ranks, only the rows are moved that need more than their best.

        `indices[i]` is the token's generated index (0 for the first), `masks[i]` its grammar bitmask or None. Slots are distinct.
        """
        own = [self._slots[slot] for slot in slots]
        at_once = self._at_once
        if self._fused is not None and len(own) > at_once and not any(map(changes_logits, own, indices, masks)):
            at_once *= UNCHANGED_AT_ONCE
        chunks = plan_chunks(own, indices, masks, self.vocab_size, self.one_by_one, at_once)
        both = None
        if any(chunk.kind != Kind.ARGMAX for chunk in chunks):
            tokens, status = self._sample_chunks(logits, chunks)
        elif isinstance(logits, torch.Tensor):
            tokens, status = _argmax(logits)
        else:
            both = logits.best
            tokens, status = both.unbind(1)
        rows = tuple(row for row, slot in enumerate(own) if slot.params.logprobs is not None)
        counts = tuple(own[row].params.logprobs or 0 for row in rows)
        return Sampled(
            tokens=tokens,
            status=status,
            logprobs=self._logprobs(logits, tokens, rows, max(counts)) if rows else None,
            logprob_rows=rows,
            logprob_counts=counts,
            both=both,
        )

    def prompt_logprobs(self, logits: torch.Tensor, targets: torch.Tensor, count: int) -> LogprobRows:
        """Log-probabilities of `targets` [R] int64 and the best `count` alternatives under `logits` [R, V] float32."""
        return logprob_rows(logits, targets, count)

    def _logprobs(self, logits: torch.Tensor | LeftLogits, tokens: torch.Tensor, rows: tuple[int, ...], count: int) -> LogprobRows:
        if len(rows) < len(logits) or not isinstance(logits, torch.Tensor):
            (index,) = upload([_int64(rows)], self.device)
            logits, tokens = pick_rows(logits, index), tokens.index_select(0, index)
        return logprob_rows(logits, tokens, count)

    def _sample_chunks(self, logits: torch.Tensor | LeftLogits, chunks: list[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.empty(len(logits), dtype=torch.int64, device=self.device)
        status = torch.empty(len(logits), dtype=torch.int32, device=self.device)
        moved = iter(upload([array for chunk in chunks for array in chunk.arrays.values()], self.device))
        for chunk in chunks:
            args = {name: next(moved) for name in chunk.arrays}
            if chunk.kind == Kind.ARGMAX:
                chunk_tokens, chunk_status = _best(logits, args["rows"])
            else:
                chunk_tokens, chunk_status = self._run(chunk, args, logits)
            tokens.index_copy_(0, args["rows"], chunk_tokens)
            status.index_copy_(0, args["rows"], chunk_status)
        return tokens, status

    def _run(
        self, chunk: Chunk, args: dict[str, torch.Tensor], logits: torch.Tensor | LeftLogits
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, status) of a chunk."""
        fused = self._fused if "keys" in args else None
        if fused is not None and EDITS.isdisjoint(args):
            rows = args["rows"]
            return fused.draw(args, logits, rows) if isinstance(logits, torch.Tensor) else fused.draw(args, logits.pick(rows))
        edited = pick_rows(logits, args["rows"])
        self._edit(args, edited)
        if fused is not None:
            tokens, status = fused.draw(args, edited)
        elif "keys" in args:
            tokens, status = self._draw(chunk, args, edited)
        else:
            tokens, status = _argmax(edited)
        if "penalty_pool" in args:
            self._penalties.count(args["penalty_pool"], tokens.index_select(0, args["penalty_rows"]))
        return tokens, status

    def _edit(self, args: dict[str, torch.Tensor], logits: torch.Tensor) -> None:
        if "bias_places" in args:
            edits.add_bias(logits, args["bias_places"], args["bias_values"])
        if "forbidden" in args:
            edits.forbid(logits, args["forbidden"])
        if "mask_rows" in args:
            edits.apply_mask(logits, args["mask_rows"], args["mask_words"])
        if "penalty_rows" in args:
            rows = args["penalty_rows"]
            strengths = (args["repetition"], args["presence"], args["frequency"])
            penalised = self._penalties.penalise(logits.index_select(0, rows), args["penalty_pool"], *strengths)
            logits.index_copy_(0, rows, penalised)

    def _draw(self, chunk: Chunk, args: dict[str, torch.Tensor], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, status) of edited logits, which it overwrites."""
        best = logits.amax(dim=1, keepdim=True)
        status = _status(best[:, 0])
        if self.one_by_one and int(status[0]) != RowStatus.OK:
            return torch.zeros(1, dtype=torch.int64), status
        # Relative to the best logit, so that a small temperature cannot overflow.
        scaled = logits.sub_(best).div_(args["temperature"])
        return torch.where(status == RowStatus.OK, self._race(chunk, args, scaled), 0), status

    def _race(self, chunk: Chunk, args: dict[str, torch.Tensor], scaled: torch.Tensor) -> torch.Tensor:
        """[w] int64: the winner of each row's race among the tokens that the filters leave."""
        if "log_min_p" in args:
            filters.drop_below_min_p(scaled, args["log_min_p"])
        ids, dropped = None, 0.0
        if self.one_by_one and chunk.kind == Kind.FILTERED:
            ids, dropped = self._narrow(chunk, scaled)
            scaled = scaled[:, ids]
        if "top_k" in args:
            scaled, columns = filters.rank_and_cut(scaled, args["top_k"], args["top_p"], dropped)
            ids = columns if ids is None else ids[columns]
        words = self._words if ids is None else self._words[ids]
        winner = (scaled - log_exponential(words, args["keys"]) * args["noise"]).argmax(dim=1)
        if ids is None:
            return winner
        return ids.expand(scaled.shape).gather(1, winner.unsqueeze(1))[:, 0]

    def _narrow(self, chunk: Chunk, scaled: torch.Tensor) -> tuple[torch.Tensor, float]:
        if "top_k" not in chunk.arrays:
            return filters.candidates(scaled, self.vocab_size, 1.0)
        return filters.candidates(scaled, int(chunk.arrays["top_k"][0, 0]), float(chunk.arrays["top_p"][0, 0]))


def pick_rows(logits: torch.Tensor | LeftLogits, rows: torch.Tensor) -> torch.Tensor:
    """A copy of the rows `rows` [w] int64 of logits, [w, V] float32, from wherever they are."""
    return logits.index_select(0, rows) if isinstance(logits, torch.Tensor) else logits.pick(rows)


def _best(logits: torch.Tensor | LeftLogits, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, status) of the greedy rows `rows`."""
    if isinstance(logits, torch.Tensor):
        return _argmax(logits.index_select(0, rows))
    tokens, status = logits.best.index_select(0, rows).unbind(1)
    return tokens, status.int()


def _int64(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)


def _status(best: torch.Tensor) -> torch.Tensor:
    """[w] int32 `RowStatus` from each row's largest logit (NaN when the row holds one)."""
    empty = (best == -torch.inf).to(torch.int32) * RowStatus.EMPTY
    not_finite = (best.isnan() | (best == torch.inf)).to(torch.int32) * RowStatus.NOT_FINITE
    return empty + not_finite


def _argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, status): the largest logit, the lowest id among equals."""
    tokens = logits.argmax(dim=1)
    status = _status(logits.gather(1, tokens.unsqueeze(1))[:, 0])
    return torch.where(status == RowStatus.OK, tokens, 0), status
