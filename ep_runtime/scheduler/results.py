"""What a step's result means for one sequence: pure functions of plain values, and the update that is emitted."""

from __future__ import annotations

from ep_runtime.scheduler.admission import row_limit, runs_alone
from ep_runtime.scheduler.core import NEVER, SchedulerError, Sequence, SequenceImage, SpanResult
from protocol.commands import Span
from protocol.loops import several
from protocol.messages import FinishReason, SequenceUpdate, Submit, TokenLogprobs


def make_sequence(message: Submit, arrival: int, eos_token_ids: tuple[int, ...]) -> Sequence:
    """A WAITING sequence. Tokens of an earlier epoch count as generated and emitted; their prompt logprobs were reported too.

    A grammar's first mask comes with the message.
    """
    sampling, prompt_len = message.sampling, len(message.prompt)
    stops = frozenset(sampling.stop_token_ids)
    wants_logprobs = sampling.prompt_logprobs is not None and prompt_len > 1 and not message.generated
    return Sequence(
        request_id=message.request_id,
        group=message.group,
        prompt_len=prompt_len,
        tokens=message.prompt + message.generated,
        sampling=sampling,
        priority=message.priority,
        arrival=arrival,
        adapter=message.adapter,
        stops=stops if sampling.ignore_eos else stops.union(eos_token_ids),
        stop_from=prompt_len + sampling.min_tokens,
        token_limit=prompt_len + sampling.max_tokens,
        row_limit=row_limit(prompt_len, sampling.max_tokens),
        logprobs_from=1 if wants_logprobs else NEVER,
        mask_index=len(message.generated) if sampling.grammar else NEVER,
        failures=message.suspicions,
        suspected=runs_alone(message.suspicions),
        images=tuple(SequenceImage(start=image.start, rows=image.rows, digest=image.digest) for image in message.images),
        loops=several(sampling.loops),
        depths=list(message.depths),
    )


def finish_reason(seq: Sequence) -> FinishReason | None:
    """Whether the last known token ends the sequence. A stop id counts from `min_tokens` on, and before the length does."""
    known = len(seq.tokens)
    if known > seq.prompt_len and known >= seq.stop_from and seq.tokens[-1] in seq.stops:
        return "stop"
    return "length" if known >= seq.token_limit else None


def sampled_depth(seq: Sequence, span: Span, got: SpanResult) -> int:
    """How many loops the row ran that sampled a token of a sequence with several; SchedulerError when that cannot be so."""
    least, most = (0, 0) if seq.loops is None or span.start < seq.prompt_len else (1, seq.loops.most)
    if not least <= got.depth <= most:
        row = span.start + span.length - 1
        raise SchedulerError(f"{seq.request_id} ran {got.depth} loops at position {row}, {least} to {most} are possible")
    return got.depth


def unreported(seq: Sequence, got: SpanResult) -> tuple[int, list[TokenLogprobs] | None]:
    """(first position, entries) of the prompt logprobs that no earlier update carried: a recomputed chunk may bring some again."""
    if got.prompt_logprobs is None or seq.logprobs_from >= seq.prompt_len:
        return 0, None
    skip = max(seq.logprobs_from - got.prompt_start, 0)
    entries = got.prompt_logprobs[skip:]
    if not entries:
        return 0, None
    start = got.prompt_start + skip
    end = start + len(entries)
    seq.logprobs_from = end if end < seq.prompt_len else NEVER
    return start, entries


def terminal(seq: Sequence, finish: FinishReason, error: str | None = None, status: int = 200) -> SequenceUpdate:
    """The last update of a sequence that ends outside a result."""
    return SequenceUpdate(seq.request_id, [], finish=finish, error=error, status=status, cached=take_cached(seq))


def refused(request_id: str, error: str, status: int, retry_after: float | None = None) -> SequenceUpdate:
    """The only update of a request that is not taken."""
    return SequenceUpdate(request_id, [], finish="error", error=error, status=status, retry_after=retry_after)


def take_cached(seq: Sequence) -> int:
    """Prompt tokens found in the prefix tree, for the first update; 0 for the others."""
    seq.emitted += 1
    cached, seq.cached = seq.cached, 0
    return cached
