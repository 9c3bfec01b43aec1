"""What a rank says of its state when ranks are compared, and what it logs when they turned out to differ."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from protocol.slots import SequenceState, table_lines

log = logging.getLogger(__name__)


class StateDigest(NamedTuple):
    """Equal on ranks that agree: a u64 of all sections, and their text for `protocol.sections`."""

    value: int
    text: str


def log_slots(rank: int, slots: Sequence[SequenceState | None]) -> None:
    """Log this rank's slot table, for an epoch that ends because ranks differ: the logs of two ranks can then be compared."""
    lines = table_lines(slots) or ["every slot is EMPTY"]
    log.warning("slot table of rank %d:\n  %s", rank, "\n  ".join(lines))
