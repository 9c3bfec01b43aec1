"""The progress page: where a rank's engine is, in memory of its supervisor, which survives the engine.

One engine writes, its supervisor reads, without a lock: each field is one aligned 64-bit store, and a reader that sees two fields
of different moments is off by one move. Layout, in little-endian int64 words: moves, epoch, step, command, phase, collectives,
monotonic time of the last move in nanoseconds, bytes of the request id; then the id itself, UTF-8, zero-filled.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from enum import IntEnum

from protocol.commands import Cmd

ID_BYTES = 192
_WORDS = 8
PAGE_BYTES = 8 * _WORDS + ID_BYTES
_MOVES, _EPOCH, _STEP, _COMMAND, _PHASE, _COLLECTIVES, _TIME, _ID_LENGTH = range(_WORDS)


class Phase(IntEnum):
    """What an engine is doing."""

    UNKNOWN = -1
    """The page names no phase: something else than an engine has written on it."""
    STARTING = 0
    LOADING = 1
    IDLE = 2
    """It has its weights and is in no epoch."""
    CONNECTING = 3
    """It opens or joins an epoch."""
    WAITING = 4
    """For the next command, or on the head for something to do."""
    PREPARING = 5
    VOTING = 6
    EXECUTING = 7
    ACKNOWLEDGING = 8
    """It has run the command; the head waits for the others' acks."""
    READING = 9
    """The head waits for the device's results."""
    LEAVING = 10
    STANDBY = 11
    """It has imported everything and waits to be told its rank."""


_COMMANDS = frozenset(Cmd)
_PHASES = frozenset(Phase)


@dataclass(frozen=True, slots=True)
class Position:
    """One reading. `command` is 0 before the first; `idle_s` is the time since the engine last moved."""

    moves: int
    epoch: int
    step: int
    command: int
    phase: Phase
    collectives: int
    idle_s: float
    alone: str

    @property
    def command_name(self) -> str:
        """The command's name as in the wire table; empty before the first, the number itself if no command has it."""
        if self.command in _COMMANDS:
            return Cmd(self.command).name
        return str(self.command) if self.command else ""


class ProgressPage:
    """The page over any buffer of PAGE_BYTES: shared memory in a server, private memory elsewhere."""

    def __init__(self, buffer: mmap.mmap | bytearray | None = None) -> None:
        self._bytes = memoryview(bytearray(PAGE_BYTES) if buffer is None else buffer)
        self._words = self._bytes[: 8 * _WORDS].cast("q")

    @classmethod
    def create(cls) -> tuple[ProgressPage, int]:
        """A new shared page and the descriptor that opens it in another process; the caller closes it."""
        descriptor = os.memfd_create("ep_runtime-progress", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, PAGE_BYTES)
        return cls.open(descriptor), descriptor

    @classmethod
    def open(cls, descriptor: int) -> ProgressPage:
        """The page behind an inherited descriptor, which stays open."""
        return cls(mmap.mmap(descriptor, PAGE_BYTES))

    # The engine's side

    def enter(self, phase: Phase) -> None:
        """Note a move into `phase`; entering the same one again is a move too."""
        words = self._words
        words[_PHASE] = phase
        words[_TIME] = time.monotonic_ns()
        words[_MOVES] += 1

    def begin_epoch(self, epoch: int) -> None:
        """A new epoch: no step yet."""
        words = self._words
        words[_EPOCH], words[_STEP], words[_COMMAND], words[_COLLECTIVES] = epoch, 0, 0, 0
        self.set_alone("")
        self.enter(Phase.CONNECTING)

    def begin_command(self, step: int, command: int) -> None:
        """A command is taken up."""
        words = self._words
        words[_STEP], words[_COMMAND], words[_COLLECTIVES] = step, command, 0
        self.enter(Phase.PREPARING)

    def collective(self, count: int = 1) -> None:
        """So many more collectives of this command are about to start."""
        words = self._words
        words[_COLLECTIVES] += count
        words[_TIME] = time.monotonic_ns()
        words[_MOVES] += 1

    def set_alone(self, request_id: str) -> None:
        """The only request in the batch because it is suspected; empty for none. Ids longer than ID_BYTES are cut."""
        data = request_id.encode()[:ID_BYTES]
        self._words[_ID_LENGTH] = 0
        self._bytes[8 * _WORDS : 8 * _WORDS + len(data)] = data
        self._words[_ID_LENGTH] = len(data)

    # The supervisor's side

    def read(self) -> Position:
        """Where the engine is now, by this host's monotonic clock. Never raises: a dying engine may have left anything here."""
        words = [max(word, 0) for word in self._words]
        phase = self._words[_PHASE]
        length = min(words[_ID_LENGTH], ID_BYTES)
        idle_ns = time.monotonic_ns() - words[_TIME] if words[_TIME] else 0
        return Position(
            moves=words[_MOVES],
            epoch=words[_EPOCH],
            step=words[_STEP],
            command=words[_COMMAND],
            phase=Phase(phase) if phase in _PHASES else Phase.UNKNOWN,
            collectives=words[_COLLECTIVES],
            idle_s=max(0, idle_ns) / 1e9,
            alone=bytes(self._bytes[8 * _WORDS : 8 * _WORDS + length]).decode(errors="replace"),
        )
