"""What a rank says of its state when ranks are compared, and what it logs when they turned out to differ."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ep_runtime.engine.staging import download
from model.state.checksum import mix
from protocol.slots import SequenceState, table_lines

if TYPE_CHECKING:
    from model.base import Communicator

log = logging.getLogger(__name__)


class StateDigest(NamedTuple):
    """Equal on ranks that agree: a u64 of all sections, and their text for `protocol.sections`."""

    value: int
    text: str


def read_sums(sums: Mapping[str, torch.Tensor], comm: Communicator) -> dict[str, int]:
    """A u64 of each int64 scalar, in one copy to the host that is launched before the device is waited for."""
    if not sums:
        comm.settle()
        return {}
    stacked = torch.stack(list(sums.values()))
    host = download(stacked)
    done = torch.cuda.Event() if stacked.is_cuda else None
    if done is not None:
        done.record()
    comm.settle()
    if done is not None:
        done.synchronize()  # at once where ranks are waited for; a rank alone waits here
    return {name: mix([value]) for name, value in zip(sums, host.tolist(), strict=True)}


def log_slots(rank: int, slots: Sequence[SequenceState | None]) -> None:
    """Log this rank's slot table, for an epoch that ends because ranks differ: the logs of two ranks can then be compared."""
    lines = table_lines(slots) or ["every slot is EMPTY"]
    log.warning("slot table of rank %d:\n  %s", rank, "\n  ".join(lines))
