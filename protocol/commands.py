"""The closed set of commands that the head broadcasts, one frozen struct each.

A struct's fields are the msgpack body of its frame, validated strictly on decoding: unknown fields, wrong types and values out
of range are refused. `seq_id` (the slot, or the batch) and the token array travel in the frame, not in the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Annotated, ClassVar

import msgspec

BATCH = 0xFFFF_FFFF
"""`seq_id` of a command that concerns the batch rather than one slot."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Slot = Annotated[int, msgspec.Meta(ge=0, le=2**24 - 1)]

MOST_LOOPS = 16
"""The most loops that a message can name."""

Depth = Annotated[int, msgspec.Meta(ge=0, le=MOST_LOOPS)]
Probability = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Cmd(IntEnum):
    """Codes on the wire. Never reused, never renumbered."""

    ALLOC = 1
    PREFILL_CHUNK = 2
    DECODE = 3
    MIXED = 4
    VERIFY = 5
    DRAFT = 6
    VISION = 7
    SNAPSHOT = 8
    RESTORE = 9
    COPY = 10
    SAVE = 11
    LOAD = 12
    ADAPTER = 13
    PLACE = 14
    WARM = 15
    FREE = 16
    DIGEST = 17
    PING = 18
    SHUTDOWN = 19


class Wanted(IntEnum):
    """Which rows of a span want logits; a list of row offsets is the fourth form."""

    NONE = 0
    LAST = 1
    ALL = 2


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """Base of all command bodies. `voted` marks commands that can fail on one rank alone and are voted on before execution."""

    cmd: ClassVar[Cmd]
    voted: ClassVar[bool] = False
    per_slot: ClassVar[bool] = True


class Loops(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How often a looped model runs its core for a sequence: `most` times, or less for a token that its exit heads stop.

    A decoded token stops after loop j when the probability of its exit head is at least `thresholds[j - 1]`. There are `most - 1`
    of them, or none: then every loop runs. A prompt's tokens are routed by the model alone.
    """

    most: Annotated[int, msgspec.Meta(ge=1, le=MOST_LOOPS)]
    thresholds: list[Probability] = []


class Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The rows of one sequence in a forward, in sequence order.

    The sequence's rows are positions `start .. start + length - 1`. With `fed`, the first row's token is the slot's last
    sampled token, already on the device, and the frame carries `length - 1` tokens for this span; otherwise `length`.
    `sampled` says that the head samples a token from this span's last row, and that every rank keeps it as the slot's last token.
    `new_blocks` are appended to the slot's block table before the rows are written.

    `depth` is that of a replayed row of a slot with more than one loop: how many it ran the first time. 0: the exit heads decide.
    """

    slot: Slot
    start: Count
    length: Positive
    fed: bool
    sampled: bool
    wanted: Wanted | list[Count]
    new_blocks: list[Count]
    depth: Depth = 0


class Forward(Body, frozen=True):
    """Body of PREFILL_CHUNK, DECODE, MIXED and VERIFY: one ragged forward over `spans`, in this order on every rank."""

    per_slot: ClassVar[bool] = False
    spans: Annotated[list[Span], msgspec.Meta(min_length=1)]


class PrefillChunk(Forward, frozen=True):
    """Every span is a piece of a prompt."""

    cmd: ClassVar[Cmd] = Cmd.PREFILL_CHUNK


class Decode(Forward, frozen=True):
    """Every span is one row."""

    cmd: ClassVar[Cmd] = Cmd.DECODE


class Mixed(Forward, frozen=True):
    """Prompt pieces and decode rows together."""

    cmd: ClassVar[Cmd] = Cmd.MIXED


class Alloc(Body, frozen=True):
    """EMPTY -> ACTIVE. Recurrent state is zeroed; the sequence may grow to `token_budget` rows.

    A prefix hit gives the slot its first `prefix_length` positions at once: `prefix_blocks` hold them already and are shared,
    never written. `prefix_length` is a multiple of the block size. Positions below `prompt_length` are the prompt's: an image's
    placeholder token there must have a row of VISION, while one that was generated is a token like any other. `loops` of more than
    one bind the slot's forwards: the prompt in one piece, without a prefix, then single rows. None is one loop. Where ranks divide
    the sequences, `owner_rank` keeps this one: the slot modulo the ranks. Its blocks, here and in every command, are of that rank.
    """

    cmd: ClassVar[Cmd] = Cmd.ALLOC
    voted: ClassVar[bool] = True
    token_budget: Positive
    prompt_length: Count = 0
    adapter: Count = 0
    owner_rank: Count = 0
    prefix_length: Count = 0
    prefix_blocks: list[Count] = []
    loops: Loops | None = None


class VisionGrid(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where an image's rows stand in a prompt: positions `start .. start + height * width - 1`, row by row of its grid.

    An image is one grid; a video is one for each group of frames that its encoder takes together.
    """

    start: Count
    height: Positive
    width: Positive

    @property
    def stop(self) -> int:
        """The position after its last row."""
        return self.start + self.height * self.width


class Vision(Body, frozen=True):
    """Embeddings of the images in an ACTIVE slot's prompt, before the prefill that needs them.

    `grids` are all of the prompt's, in position order; they decide the rotary positions of everything behind them. The first
    `skipped` lie in the slot's prefix, and their rows are not needed. The rows of the others, `rows` in number, follow in one
    tensor broadcast over the device group: `[rows, row_width]` in the model's dtype; nothing follows when all grids are skipped.
    A rank keeps them until the slot has grown past the last grid, or is freed.
    """

    cmd: ClassVar[Cmd] = Cmd.VISION
    voted: ClassVar[bool] = True
    grids: Annotated[list[VisionGrid], msgspec.Meta(min_length=1)]
    rows: Count
    skipped: Count = 0


class Free(Body, frozen=True):
    """Any state -> EMPTY."""

    cmd: ClassVar[Cmd] = Cmd.FREE


class Copy(Body, frozen=True):
    """The target slot (EMPTY -> ACTIVE) becomes a copy of the first `length` positions of `source`.

    `shared_blocks` are the source's full blocks, referenced by both; `block_pairs` are (from, to) copies of partial blocks,
    appended after them. Recurrent state is copied whole, so `length` must be the source's length where there is any.
    """

    cmd: ClassVar[Cmd] = Cmd.COPY
    voted: ClassVar[bool] = True
    source: Slot
    length: Positive
    token_budget: Positive
    shared_blocks: list[Count] = []
    block_pairs: list[tuple[Count, Count]] = []


class Warm(Body, frozen=True):
    """Compile, connect and capture for these batch buckets (rows)."""

    cmd: ClassVar[Cmd] = Cmd.WARM
    voted: ClassVar[bool] = True
    per_slot: ClassVar[bool] = False
    buckets: list[Positive]


class Digest(Body, frozen=True, omit_defaults=True):
    """Every rank acks a digest of its slot table, recurrent states, held images, and the last recorded forward.

    `report`: it also logs its slot table, because ranks differ and the epoch ends.
    """

    cmd: ClassVar[Cmd] = Cmd.DIGEST
    per_slot: ClassVar[bool] = False
    report: bool = False


class Ping(Body, frozen=True):
    """Liveness while idle."""

    cmd: ClassVar[Cmd] = Cmd.PING
    per_slot: ClassVar[bool] = False


class Shutdown(Body, frozen=True):
    """Leave the loop and exit with status 0."""

    cmd: ClassVar[Cmd] = Cmd.SHUTDOWN
    per_slot: ClassVar[bool] = False


BODIES: Mapping[int, type[Body]] = MappingProxyType(
    {body.cmd: body for body in (Alloc, PrefillChunk, Decode, Mixed, Copy, Vision, Warm, Free, Digest, Ping, Shutdown)}
)
"""The commands in use, by code. The other codes of `Cmd` are reserved and refused by name."""


def forward_command(spans: list[Span]) -> Forward:
    """The one command for these spans: DECODE when each is one row, PREFILL_CHUNK when none is fed, MIXED otherwise."""
    if all(span.length == 1 for span in spans):
        return Decode(spans=spans)
    if not any(span.fed for span in spans):
        return PrefillChunk(spans=spans)
    return Mixed(spans=spans)
