"""What kernels need of a group of ranks that show each other memory, and how they wait in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.launch import cdiv

PROGRAMS = 384
"""Most programs of a launch: three a multiprocessor, so that none waits for a peer that waits for its own start."""

GATHER_BLOCK = 2048
"""Elements that a program of a gather moves at a time."""

WORD_ROWS = 256
"""Most rows that go in words, a program each. Words take twice the bytes: from here on, that costs more than a signal."""

SPINS_A_LOOK = 8192
"""Reads of a peer's signal between looks at the abort word, about a millisecond.

The word lies in host memory, where reads of all programs queue, 0.6 us each: looks that take longer than their interval make the
rank late for its peers, which then look too. With 1024 reads by every warp of 128 programs, that state kept itself up.
"""

SIGNAL_LINE = 32
"""int32 words of a cache line: one program's signals. Those who wait for others then do not slow its peers' writes down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """How a program waits for its peers.

    `spins`: reads between looks at the abort word. `pause_ns`: pause before each read, 0 for none. `reader`: every warp reads, or
    one thread does and tells the others, by a load or by an atomic operation.
    """

    spins: int = SPINS_A_LOOK
    pause_ns: int = 0
    reader: Literal["warps", "thread", "atomic"] = "thread"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerMemory:
    """What the kernels need of a group. Tables are int64 `[world]` on the device: the ranks' buffers and signals, own ones too.

    A buffer holds two halves of `capacity` elements and, from the `words_at`-th 8 bytes on, two times `world * slot` words
    of 8 bytes, all three even. Signals are int32 `[PROGRAMS * SIGNAL_LINE]`, turns int32 `[2 * PROGRAMS]`, those of words last.
    Sums of more than `word_rows` rows go in tiles, with `two_shots` by way of a tile's owner.
    Words, signals and turns are zero at the start of an epoch. `abort` is one int32 in pinned host memory. One memory serves sums
    of one width, or gathers, or shards that stay (`kernels.shards_triton`: `shown` is the buffer without its words), and always by
    the same number of `programs`, whose signals are `line` words apart, from `world` to SIGNAL_LINE.
    """

    rank: int
    world: int
    buffers: torch.Tensor
    signals: torch.Tensor
    turns: torch.Tensor
    abort: torch.Tensor
    capacity: int
    programs: int = PROGRAMS
    line: int = SIGNAL_LINE
    waiting: Waiting = Waiting()
    words_at: int = 0
    slot: int = 0
    word_rows: int = WORD_ROWS
    two_shots: bool = False
    shown: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not (self.world <= self.line <= SIGNAL_LINE and 1 <= self.programs <= PROGRAMS):
            raise ValueError(f"{self.programs} programs with signals {self.line} words apart do not fit the memory for signals")

    @property
    def share(self) -> int:
        """Elements of a half that one peer writes."""
        return self.capacity // max(1, self.world - 1) // 64 * 64

    def fits(self, rows: int, width: int) -> bool:
        """Whether a partial `[rows, width]` can be summed in one launch."""
        return rows * width <= self.share

    def in_words(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Whether a partial `[rows, width]` goes in words."""
        words = rows * width * dtype.itemsize // 4
        return rows <= min(self.word_rows, WORD_ROWS) and words <= self.slot and width % 4 == 0

    def fits_gather(self, rows: int, width: int) -> bool:
        """Whether shards `[rows, width]` can be gathered in one launch."""
        return gather_share(rows * width, self.programs) <= self.capacity // self.programs


def gather_share(elements: int, programs: int) -> int:
    """Elements of one program: whole blocks, at most so many programs."""
    return cdiv(elements, programs * GATHER_BLOCK) * GATHER_BLOCK
