"""The nouns of the scheduler: sequence, plan, and what a step's results are. No logic beyond invariants, no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import msgspec

from protocol.commands import Loops, Span
from protocol.messages import SamplingParams

NEVER = sys.maxsize
"""A step number or position that is never reached."""


class SchedulerError(Exception):
    """The caller broke the scheduler's contract, or an owner's books do not add up."""


class SeqState(IntEnum):
    """Where a sequence stands. WAITING and RUNNING ones may be planned; DRAINING ones wait for results and then queue again."""

    WAITING = 0
    RUNNING = 1
    DRAINING = 2
    FINISHED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceImage:
    """An image of a prompt: `rows` positions from `start` on, each of them a placeholder token. `digest` names its contents."""

    start: int
    rows: int
    digest: bytes

    @property
    def stop(self) -> int:
        """The position after its last one."""
        return self.start + self.rows


@dataclass(frozen=True, kw_only=True, slots=True)
class NextImage:
    """An image that a waiting sequence needs: image `index` of its request. `alone`: the request is a suspect's."""

    request_id: str
    index: int
    digest: bytes
    alone: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """Everything that bounds a plan. `max_batch_tokens` is the token budget of a step; `chunk_multiple` the model's cut points.

    ValueError when a running prompt could get no piece beside `max_slots - 1` decode rows.
    """

    max_slots: int
    num_blocks: int
    """Of each owner."""
    block_size: int
    max_model_len: int
    max_batch_tokens: int
    max_queue: int
    eos_token_ids: tuple[int, ...] = ()
    prefix_cache: bool = False
    chunk_multiple: int = 1
    single_chunk: bool = False
    max_scored_rows: int = NEVER
    """Prompt rows of one plan whose logits are wanted; a `single_chunk` prompt wants all of its own whatever this says."""
    max_image_tokens: int = 0
    """Rows of images that all slots hold together, and the most of one prompt."""
    max_loops: int = 1
    """The most loops of a sequence; 1: the model is not looped."""
    owners: int = 1
    """Ranks that divide the sequences: owner `slot % owners` keeps the one of a slot, in blocks of its own."""
    retry_after: float = 1.0
    """Seconds that a refused request is told to wait."""

    def __post_init__(self) -> None:
        for name in ("max_slots", "num_blocks", "block_size", "max_model_len", "chunk_multiple", "max_loops", "owners"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        for name in ("max_queue", "max_image_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must not be negative")
        if self.max_scored_rows < self.chunk_multiple:
            raise ValueError(f"max_scored_rows is {self.max_scored_rows}, less than a chunk of {self.chunk_multiple} tokens")
        least = self.max_slots + self.chunk_multiple - 1
        if self.max_batch_tokens < least:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}; {self.max_slots} slots and chunks of {self.chunk_multiple} "
                f"tokens need at least {least}"
            )


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """One sequence from submission to its terminal event.

    `tokens` is prompt and generated tokens known on the host. `planned` counts positions already in launched or planned steps:
    `planned - len(tokens)` rows beyond the known tokens are fed on the device. `owner` is that of its slot. `in_flight` counts
    planned and launched steps that name the slot and whose results are unread. `emitted` counts updates given; `cached` is the
    prefix hit until one reports it.
    """

    request_id: str
    group: str
    prompt_len: int
    tokens: list[int]
    sampling: SamplingParams
    priority: int = 0
    arrival: int = 0
    adapter: int = 0
    slot: int | None = None
    owner: int = 0
    blocks: list[int] = field(default_factory=list)
    planned: int = 0
    in_flight: int = 0
    emitted: int = 0
    aborted: bool = False
    cached: int = 0

    state: SeqState = SeqState.WAITING
    stops: frozenset[int] = frozenset()
    """Token ids that end the sequence once `stop_from` tokens are known."""
    stop_from: int = 0
    token_limit: int = 0
    """prompt_len + max_tokens."""
    row_limit: int = 0
    """Positions that are ever computed: the last token is sampled, never fed."""
    prefill_len: int = 0
    """Tokens known at admission: all of them are given, rows after them are fed."""
    capacity: int = 0
    """Positions that `blocks` hold."""
    digests: list[bytes] = field(default_factory=list)
    """Chained block digests: entry 0 is the root, entry i + 1 block i; grown when asked for."""
    next_entry: int = NEVER
    """Results up to this position complete the next block for the prefix tree."""
    logprobs_from: int = NEVER
    """First prompt position whose logprobs are asked for and unreported."""
    void_from: int = NEVER
    """Results of steps from this number on are void, because that step failed."""
    mask_index: int = NEVER
    """The last generated index whose grammar mask is here; rows that sample later ones are not planned. NEVER without a grammar."""
    failures: int = 0
    """Failed batches and suspicious ends of epochs that it was in; see `admission.runs_alone`."""
    suspected: bool = False
    """Epochs alone made it a suspect: it stays one to its end, since one more costs all ranks another epoch."""
    requeued: bool = False
    images: tuple[SequenceImage, ...] = ()
    """In prompt order, not overlapping."""
    image_rows: int = 0
    """Rows of its images that its slot holds."""
    rows_until: int = NEVER
    """Results up to this position let these rows go."""
    loops: Loops | None = None
    """When it may run more than one loop. Then its prompt is one piece, and every token behind it a row of its own."""
    depths: list[int] = field(default_factory=list)
    """With `loops`, for each generated token: how many the row ran that sampled it, 0 for the prompt's last."""

    @property
    def key(self) -> tuple[int, int]:
        """Scheduling order: lower priority value first, then arrival."""
        return (self.priority, self.arrival)

    @property
    def lacks_mask(self) -> bool:
        """True when the grammar's mask for the next token that it would sample is not here."""
        return max(self.planned + 1, len(self.tokens)) - self.prompt_len > self.mask_index

    def replayed_depth(self, position: int) -> int:
        """How many loops the row at `position` ran when it sampled the next token; 0 for a prompt's row, and for a new one."""
        sampled = position + 1 - self.prompt_len
        return self.depths[sampled] if 0 < sampled < len(self.depths) else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotAlloc:
    """One ALLOC of a plan, and the VISION after it when the prompt has images: the first `skipped` lie in the prefix."""

    slot: int
    request_id: str
    token_budget: int
    prompt_length: int
    adapter: int
    prefix_length: int
    prefix_blocks: tuple[int, ...]
    images: tuple[SequenceImage, ...] = ()
    skipped: int = 0
    loops: Loops | None = None
    owner: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One step: FREEs, then ALLOCs, then one forward over `spans` (may be empty when only slots move).

    `tokens` are the given tokens of the spans, concatenated in span order. `owners[i]` is the request of span i, `indices[i]` the
    generated index of the token that it samples, if it does. `alone`: the only span is of a suspect, which is in no batch with
    others.
    """

    frees: tuple[int, ...]
    allocs: tuple[SlotAlloc, ...]
    spans: tuple[Span, ...]
    tokens: tuple[int, ...]
    owners: tuple[str, ...]
    indices: tuple[int, ...]
    alone: bool = False


class SpanResult(msgspec.Struct, frozen=True):
    """What the device gave for one span: the sampled token, if the span sampled one, with its logprobs, and prompt logprobs.

    `depth` is how many loops its row ran, for a sampled span of a sequence with several; 0 for a prompt's.
    """

    token: int | None = None
    logprobs: object | None = None
    prompt_start: int = 0
    prompt_logprobs: list | None = None
    depth: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Results of one plan, one entry a span."""

    plan: Plan
    spans: tuple[SpanResult, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepRecord:
    """A plan with the sequences of its spans, kept until its results are read. `admitted` follows `allocs`."""

    number: int
    plan: Plan
    sequences: tuple[Sequence, ...]
    admitted: tuple[Sequence, ...]


class SchedulerStats(NamedTuple):
    """Gauges and totals; the names are those of `EngineStats`. Evictable cached blocks count as free."""

    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    free_slots: int
    total_slots: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
