"""How long to wait before trying again: the first repetition comes at once, the next ones ever later, up to a limit."""

from __future__ import annotations

FIRST_START_SECONDS = 0.5
LONGEST_START_SECONDS = 30.0
FIRST_CONNECT_SECONDS = 0.1
LONGEST_CONNECT_SECONDS = 5.0


def start_pause(failures: int) -> float:
    """Seconds before a process is started when its last `failures` starts in a row have failed: 0, 0.5, 1, 2, 4 .. 30."""
    return min(FIRST_START_SECONDS * 2 ** min(failures - 1, 16), LONGEST_START_SECONDS) if failures else 0.0


def connect_pause(tries: int) -> float:
    """Seconds before the head is tried again after `tries` vain ones in a row: 0.1, 0.2, 0.4 .. 5."""
    return min(FIRST_CONNECT_SECONDS * 2 ** min(max(tries - 1, 0), 16), LONGEST_CONNECT_SECONDS)
