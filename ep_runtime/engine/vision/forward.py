"""What images add to a forward: checks of its tokens, rotary positions, and the rows that stand in for placeholders.

Everything but the rows themselves follows from the command and the slot table, so every rank comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from model.vision.positions import rotary_positions
from protocol.commands import Forward, Span
from protocol.slots import SequenceState, SlotTable


def placeholder_fault(command: Forward, tokens: np.ndarray, slots: SlotTable, placeholders: Sequence[int]) -> str | None:
    """Why the given tokens of a forward do not fit the images of its slots, before it is applied; None when they do.

    Below a slot's prompt length, the placeholders stand exactly where its grids are whose rows are held. A token that was generated
    is a token like any other. `tokens` are the frame's: those of all spans but the fed ones.
    """
    if not len(tokens) and not slots.vision_rows:
        return None
    marks = np.zeros(len(tokens), dtype=bool)
    for placeholder in placeholders:
        marks |= tokens == placeholder
    if not slots.vision_rows and not marks.any():
        return None
    given = 0
    for span in command.spans:
        count = span.length - span.fed
        state = slots[span.slot]
        assert state is not None, f"slot {span.slot} passed prepare but is empty"
        if count or state.rows:
            fault = _span_fault(span, marks[given : given + count], state)
            if fault is not None:
                return f"{command.cmd.name}: {fault}"
        given += count
    return None


def _span_fault(span: Span, marks: np.ndarray, state: SequenceState) -> str | None:
    images = np.zeros(span.length, dtype=bool)
    if state.rows:
        for grid in state.grids[state.skipped :]:
            images[max(0, grid.start - span.start) : max(0, grid.stop - span.start)] = True
    if span.fed and images[0]:
        return f"position {span.start} of slot {span.slot} is an image's, its token is fed"
    start = span.start + span.fed
    prompt = max(0, state.prompt_length - start)
    wrong = np.flatnonzero(marks[:prompt] != images[span.fed :][:prompt])
    if not len(wrong):
        return None
    place = int(wrong[0])
    if marks[place]:
        return f"position {start + place} of slot {span.slot} has a placeholder, and no row of an image is held for it"
    return f"position {start + place} of slot {span.slot} is an image's, its token is no placeholder"


def batch_positions(
    spans: Sequence[Span], states: Sequence[SequenceState], shifts: Sequence[int], first_rows: np.ndarray, lengths: np.ndarray
) -> np.ndarray | None:
    """Rotary positions of a batch, int32: `[3, T]` when a span begins before the end of its images, else `[T]`.

    None: they are the rows' places in their sequences. `shifts` are those of the spans' slots: behind its images a row's position
    is its place and the shift, in all three parts alike, so that steps behind all images, decode steps among them, have `[T]`.
    """
    ahead = [state.before_image_end(span.start) for span, state in zip(spans, states, strict=True)]
    if not any(ahead) and not any(shifts):
        return None
    starts = np.fromiter((span.start for span in spans), dtype=np.int64, count=len(spans))
    places = np.repeat(starts + np.asarray(shifts) - first_rows, lengths) + np.arange(int(lengths.sum()))
    if not any(ahead):
        return places.astype(np.int32)
    out = np.tile(places.astype(np.int32), (3, 1))
    for span, state, first, has_images in zip(spans, states, first_rows.tolist(), ahead, strict=True):
        if has_images:
            out[:, first : first + span.length] = rotary_positions(state.grids, span.start, span.start + span.length)
    return out


def inserted_rows(
    spans: Sequence[Span],
    states: Sequence[SequenceState],
    held: Callable[[int], torch.Tensor | None],
    first_rows: np.ndarray,
) -> tuple[np.ndarray, torch.Tensor] | None:
    """The rows of a batch that are images', ascending, and their values `[n, row_width]`; None when there are none.

    The rows of one chunk stand side by side in their slot's tensor, whatever text is between its grids: they are cut out of it.
    """
    places: list[np.ndarray] = []
    values: list[torch.Tensor] = []
    for span, state, first in zip(spans, states, first_rows.tolist(), strict=True):
        rows = held(span.slot)
        if rows is None:
            continue
        low, high = span.start, span.start + span.length
        before = count = 0
        for grid in state.grids[state.skipped :]:
            start, stop = (min(max(bound, low), high) for bound in (grid.start, grid.stop))
            before += min(grid.stop, low) - min(grid.start, low)
            count += stop - start
            if start < stop:
                places.append(np.arange(first + start - low, first + stop - low))
        if count:
            values.append(rows.narrow(0, before, count))
    if not places:
        return None
    return np.concatenate(places), values[0] if len(values) == 1 else torch.cat(values)
