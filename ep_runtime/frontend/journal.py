"""The journal: every unfinished sequence, with all that is needed to run it again in another epoch.

An entry leaves the journal exactly once, in `record` (its terminal update) or in `withdraw` (the frontend ended it: client gone,
stop string found, drain). That is what makes one terminal event of each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ep_runtime.frontend.api.errors import ApiError
from protocol.loops import several
from protocol.messages import SequenceUpdate, Submit


class Sink(Protocol):
    """Who receives a sequence's updates. Must not raise."""

    def deliver(self, update: SequenceUpdate) -> None:
        """Take one update of this sequence."""

    def fail(self, error: ApiError) -> None:
        """This sequence is given up by this process."""


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One unfinished sequence. `tokens` are the generated ones so far; `mask` is the grammar's, for the token at `mask_index`.

    `depths` pairs with `tokens` where more than one loop may run: loops of the rows that sampled them, as in Submit.
    `epochs` are those it was sent in, oldest first; `suspected` are those of them that ended without a cause from outside.
    """

    submit: Submit
    sink: Sink
    arrival: int
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    mask: bytes = b""
    mask_index: int = 0
    epochs: list[int] = field(default_factory=list)
    suspected: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """The sequence's name on the wire."""
        return self.submit.request_id

    @property
    def sent_epoch(self) -> int | None:
        """The newest epoch that this was sent in."""
        return self.epochs[-1] if self.epochs else None

    @property
    def mask_due(self) -> bool:
        """True while the mask of the next token is not known: the sequence cannot be submitted."""
        return self.submit.sampling.grammar and self.mask_index != len(self.tokens)

    def suspect(self, epoch: int) -> None:
        """This epoch's end may be this sequence's doing; counts once an epoch, and only if it was sent in it."""
        if epoch in self.epochs and epoch not in self.suspected:
            self.suspected.append(epoch)

    def replay(self) -> Submit:
        """The message that starts this sequence, or continues it after its generated tokens."""
        return msgspec.structs.replace(
            self.submit,
            generated=list(self.tokens),
            depths=list(self.depths),
            mask=self.mask,
            suspicions=len(self.suspected),
        )


def _pixels(submit: Submit) -> int:
    return sum(len(image.pixels) for image in submit.images)


class Journal:
    """Unfinished sequences by request id. Effects on the engine are the caller's.

    `image_bytes` are the pixels of their images, those of each sequence by themselves: so they are sent.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._arrivals = 0
        self._finished = 0
        self._withdrawn = 0
        self.image_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, submit: Submit, sink: Sink) -> Entry:
        """Take a new sequence; raises ValueError when the id is in use."""
        if submit.request_id in self._entries:
            raise ValueError(f"request id {submit.request_id} is in use")
        entry = Entry(submit=submit, sink=sink, arrival=self._arrivals, mask=submit.mask)
        self._arrivals += 1
        self._entries[submit.request_id] = entry
        self.image_bytes += _pixels(submit)
        self._idle.clear()
        return entry

    def get(self, request_id: str) -> Entry | None:
        """The unfinished sequence of this id."""
        return self._entries.get(request_id)

    def record(self, update: SequenceUpdate) -> Entry | None:
        """Write down an update, ending the entry when it is terminal. None when nobody waits for this id any more."""
        entry = self._entries.get(update.request_id)
        if entry is None:
            return None
        entry.tokens.extend(update.tokens)
        entry.depths.extend(update.depths)
        if update.finish is not None:
            del self._entries[update.request_id]
            self.image_bytes -= _pixels(entry.submit)
            self._finished += 1
            self._note_idle()
        return entry

    def withdraw(self, request_ids: Iterable[str]) -> list[Entry]:
        """End sequences from this side; returns those that were unfinished."""
        gone = [entry for request_id in request_ids if (entry := self._entries.pop(request_id, None)) is not None]
        for entry in gone:
            self.image_bytes -= _pixels(entry.submit)
        self._withdrawn += len(gone)
        self._note_idle()
        return gone

    async def idle(self) -> None:
        """Return when no sequence is unfinished."""
        await self._idle.wait()

    def _note_idle(self) -> None:
        if not self._entries:
            self._idle.set()

    def unfinished(self) -> list[Entry]:
        """All entries in order of arrival."""
        return sorted(self._entries.values(), key=lambda entry: entry.arrival)

    def check_integrity(self) -> None:
        """Raise AssertionError when an entry was lost, ended twice, or holds more than it may."""
        ended = self._finished + self._withdrawn
        assert self._arrivals == ended + len(self._entries), f"{self._arrivals} arrived, {ended} ended, {len(self._entries)} left"
        arrivals = [entry.arrival for entry in self._entries.values()]
        assert len(set(arrivals)) == len(arrivals), "two entries share an arrival number"
        images = sum(_pixels(entry.submit) for entry in self._entries.values())
        assert self.image_bytes == images, f"{self.image_bytes} bytes of images are counted, {images} are there"
        for request_id, entry in self._entries.items():
            assert entry.request_id == request_id, f"{request_id} is filed under another id"
            assert len(entry.tokens) <= entry.submit.sampling.max_tokens, f"{request_id} has more tokens than its limit"
            depths = 0 if several(entry.submit.sampling.loops) is None else len(entry.tokens)
            assert len(entry.depths) == depths, f"{request_id} has {len(entry.depths)} depths, {depths} are due"
            assert entry.mask_index <= len(entry.tokens), f"{request_id} has a mask for a token that is not due"
            assert set(entry.suspected) <= set(entry.epochs), f"{request_id} is suspected of an epoch that it was not in"


def ended_unseen(entry: Entry, stop_token_ids: Iterable[int]) -> SequenceUpdate | None:
    """The terminal update of a sequence that was complete when its epoch ended before saying so; None when it must go on.

    A stop token counts from `min_tokens` on, and before the length does, as in the engine.
    """
    sampling, tokens = entry.submit.sampling, entry.tokens
    if tokens and len(tokens) >= sampling.min_tokens:
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(stop_token_ids))
        if tokens[-1] in stops:
            return SequenceUpdate(request_id=entry.request_id, tokens=[], finish="stop", stop_token=tokens[-1])
    if len(tokens) >= sampling.max_tokens:
        return SequenceUpdate(request_id=entry.request_id, tokens=[], finish="length")
    return None
