"""What a looped model may be asked to do, by the head's admission and by every rank's slot table: pure functions of plain values.

Prefill and decode are two computations when the core runs more than once. So a sequence with more than one loop has its prompt
computed in one piece, and every token behind it in a row of its own, also when it is replayed.
"""

from __future__ import annotations

from protocol.commands import Loops, Span


def several(loops: Loops | None) -> Loops | None:
    """`loops` when they are more than one. None is one loop, like `Loops(1)`."""
    return None if loops is None or loops.most == 1 else loops


def loops_fault(loops: Loops, max_loops: int) -> str | None:
    """Why a model that runs its core `max_loops` times at most cannot do this, or None."""
    if loops.most > max_loops:
        allowed = f"at most {max_loops}" if max_loops > 1 else "1: it is not looped"
        return f"loops are {loops.most}, this model has {allowed}"
    given = len(loops.thresholds)
    if given and given != loops.most - 1:
        return f"{given} exit thresholds, {loops.most} loops have {loops.most - 1}, or none"
    return None


def span_fault(span: Span, loops: Loops | None, prompt_length: int) -> str | None:
    """Why these rows cannot follow in a slot of `several(loops)`, or None."""
    last, depth = span.start + span.length - 1, span.depth
    if loops is None:
        return f"depth of row {span.start} is {depth}, the slot has one loop" if depth else None
    rows = f"row {last}" if span.length == 1 else f"rows {span.start} to {last}"
    if span.start == 0 and span.length == prompt_length:
        return f"depth of {rows} is {depth}, a prompt has none" if depth else None
    if span.length > 1 or span.start < prompt_length:
        return f"{rows}: neither the whole prompt of {prompt_length} rows nor one row behind it, as {loops.most} loops need"
    if depth > loops.most:
        return f"depth of {rows} is {depth}, it has {loops.most} loops"
    if depth and span.fed:
        return f"depth of {rows} is {depth}, and its token is fed: it cannot have run before"
    return None
