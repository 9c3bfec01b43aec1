"""The nouns of the scheduler: sequence, plan, and what a step's results are. No logic beyond invariants, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.commands import Span
from protocol.messages import SamplingParams, SequenceUpdate


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """Everything that bounds a plan. `max_batch_tokens` is the token budget of a step; `chunk_multiple` the model's cut points."""

    max_slots: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_batch_tokens: int
    max_queue: int
    eos_token_ids: tuple[int, ...] = ()
    prefix_cache: bool = False
    chunk_multiple: int = 1
    single_chunk: bool = False


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """One sequence from submission to its terminal event.

    `tokens` is prompt and generated tokens known on the host. `planned` counts positions already in launched or planned steps:
    `planned - len(tokens)` rows beyond the known tokens are fed on the device (0 or 1). `in_flight` counts launched steps that name
    the slot and whose results are unread.
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
    blocks: list[int] = field(default_factory=list)
    planned: int = 0
    in_flight: int = 0
    emitted: int = 0
    aborted: bool = False
    cached: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotAlloc:
    """One ALLOC of a plan."""

    slot: int
    request_id: str
    token_budget: int
    adapter: int
    prefix_length: int
    prefix_blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One step: FREEs, then ALLOCs, then one forward over `spans` (may be empty when only slots move).

    `tokens` are the given tokens of the spans, concatenated in span order. `owners[i]` is the request of span i.
    """

    frees: tuple[int, ...]
    allocs: tuple[SlotAlloc, ...]
    spans: tuple[Span, ...]
    tokens: tuple[int, ...]
    owners: tuple[str, ...]

    @property
    def has_prompt(self) -> bool:
        """True when some span is longer than a decode row or is not fed."""
        return any(not span.fed for span in self.spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanResult:
    """What the device gave for one span: the sampled token, if the span sampled one, with its logprobs, and prompt logprobs."""

    token: int | None = None
    logprobs: object | None = None
    prompt_start: int = 0
    prompt_logprobs: list | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Results of one plan, one entry a span."""

    plan: Plan
    spans: tuple[SpanResult, ...]


Update = SequenceUpdate
