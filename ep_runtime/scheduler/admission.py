"""Decisions of submission, admission and chunking: pure functions of plain values."""

from __future__ import annotations

from collections.abc import Sequence as Items

from ep_runtime.scheduler.core import SchedulerLimits, SequenceImage
from protocol.loops import loops_fault, several
from protocol.messages import Submit

FAILURES_TO_RUN_ALONE = 2


def blocks_for(positions: int, block_size: int) -> int:
    """Blocks that hold this many positions."""
    return -(-positions // block_size)


def row_limit(prompt_len: int, max_tokens: int) -> int:
    """Positions that a sequence ever computes: the last token is sampled from the row before it and never fed."""
    return prompt_len + max(max_tokens - 1, 0)


def refusal(prompt_len: int, max_tokens: int, limits: SchedulerLimits, image_rows: int = 0) -> str | None:
    """Why this request can never run (the text of a 400), or None. One that passes fits into the empty pool alone."""
    if prompt_len < 1:
        return "prompt is empty; at least 1 token is needed"
    if max_tokens < 0:
        return f"max_tokens is {max_tokens}; it must not be negative"
    if prompt_len + max_tokens > limits.max_model_len:
        return (
            f"prompt has {prompt_len} tokens and max_tokens is {max_tokens}, together {prompt_len + max_tokens}; "
            f"the maximum context length is {limits.max_model_len} tokens"
        )
    need = blocks_for(row_limit(prompt_len, max_tokens), limits.block_size)
    if need > limits.num_blocks:
        return (
            f"prompt has {prompt_len} tokens and max_tokens is {max_tokens}, which need {need} cache blocks of "
            f"{limits.block_size} tokens; the cache has {limits.num_blocks}"
        )
    if limits.single_chunk and prompt_len > limits.max_batch_tokens:
        return (
            f"prompt has {prompt_len} tokens; this model takes a prompt in one piece, and a step has at most "
            f"{limits.max_batch_tokens} tokens"
        )
    if image_rows > limits.max_image_tokens:
        return f"images of the prompt have {image_rows} tokens together; at most {limits.max_image_tokens} are served at once"
    return None


def loops_refusal(message: Submit, limits: SchedulerLimits) -> str | None:
    """Why the loops of this request, or the depths of its replayed tokens, cannot be served (the text of a 400), or None."""
    asked, depths, known = message.sampling.loops, message.depths, len(message.generated)
    fault = None if asked is None else loops_fault(asked, limits.max_loops)
    if fault is not None:
        return fault
    loops, rows = several(asked), len(message.prompt)
    if loops is None:
        return f"{len(depths)} depths are given for a sequence of one loop" if depths else None
    if rows > limits.max_batch_tokens:
        return (
            f"prompt has {rows} tokens; with more than one loop it is computed in one piece, and a step has at most "
            f"{limits.max_batch_tokens} tokens (max_num_batched_tokens)"
        )
    if message.sampling.prompt_logprobs is not None and not limits.single_chunk and rows > limits.max_scored_rows:
        return (
            f"prompt has {rows} tokens; with more than one loop it is computed in one piece, and prompt_logprobs are given for "
            f"pieces of at most {limits.max_scored_rows} tokens"
        )
    if len(depths) != known:
        return f"{len(depths)} depths are given for {known} generated tokens"
    if depths and (depths[0] != 0 or not all(1 <= depth <= loops.most for depth in depths[1:])):
        return f"depths must be 0 for the first generated token, and 1 to {loops.most} for the others"
    return None


def queue_full(alive: int, limits: SchedulerLimits) -> bool:
    """True when `max_queue` requests wait beyond those that the slots can hold."""
    return alive >= limits.max_slots + limits.max_queue


def piece_end(start: int, total: int, room: int, prompt_len: int, limits: SchedulerLimits, *, looped: bool = False) -> int:
    """Where the next prompt piece ends, `start < end <= total`, or `start` when none fits into `room` rows now.

    Bounds are multiples of `chunk_multiple` except the last. A `single_chunk` model's first piece covers the whole prompt; what was
    generated before a recompute may follow in any pieces, and in single rows when it is `looped`, whose prompt is one piece, too.
    """
    if looped:
        end = max(start + 1, prompt_len)
        return end if end - start <= room else start
    end = min(start + room, total)
    if limits.single_chunk:
        return end if end >= prompt_len else start
    if end < total:
        end -= end % limits.chunk_multiple
    return max(start, end)


def hit_limit(tokens: int, limits: SchedulerLimits) -> int:
    """Blocks of a prompt that may come from the prefix tree: its last token is always computed, for its logits."""
    if not limits.prefix_cache or limits.single_chunk:
        return 0
    return (tokens - 1) // limits.block_size


def whole_hits(hits: int, limits: SchedulerLimits) -> int:
    """The most of `hits` blocks that end at a chunk bound."""
    while hits * limits.block_size % limits.chunk_multiple:
        hits -= 1
    return hits


def uncut_hits(hits: int, images: Items[SequenceImage], limits: SchedulerLimits) -> int:
    """The most of `hits` blocks that end at a chunk bound and not in the middle of an image, which is found whole or not at all."""
    hits = whole_hits(hits, limits)
    for image in reversed(images):
        if image.start < hits * limits.block_size < image.stop:
            hits = whole_hits(image.start // limits.block_size, limits)
    return hits


def skipped_images(images: Items[SequenceImage], prefix_length: int) -> int:
    """How many images lie in a prefix that cuts none."""
    return sum(image.stop <= prefix_length for image in images)


def admits(need: int, available: int, running: int) -> bool:
    """Whether a prompt that takes `need` of the `available` blocks may start beside `running` sequences.

    The watermark is one block for each running sequence and one for the new one, so that no one is preempted for the next
    `block_size` steps. With nothing running there is no one to preempt, and all that `refusal` let pass fits.
    """
    if running == 0:
        return need <= available
    return need + running + 1 <= available


def runs_alone(failures: int) -> bool:
    """Whether a sequence that was in this many failed batches must be in no batch with others."""
    return failures >= FAILURES_TO_RUN_ALONE
