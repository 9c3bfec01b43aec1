"""Errors of the control plane, by scope.

An error's class says how far it reaches. `EpCommandFailed` is a command that ran and failed alike on every rank: the ranks
stay up and the next command follows. `EpLinkLost` and its subclasses end the epoch: the requests are replayed in the next.
"""

from __future__ import annotations

SHOWN = 300
"""Characters of a fault that an error message repeats."""


def brief(fault: object) -> str:
    """The start of a fault's text: what a peer sent may be repeated in it, at any length, and ends up in logs and reports."""
    text = str(fault)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


class EpError(Exception):
    """Base of every error that the runtime raises about its ranks and commands."""


class EpCommandFailed(EpError):
    """One command ran and failed alike on every rank, or was voted down before it changed anything."""


class EpLinkLost(EpError):
    """The ranks of this epoch can no longer be trusted to agree; the epoch ends."""


class EpPeerGone(EpLinkLost):
    """The stream to a peer ended: its process died or closed the socket."""


class EpFrameCorrupt(EpLinkLost):
    """Bytes on a link are not a frame of this protocol version (magic, version, checksum, lengths, body)."""


class EpOutOfOrder(EpLinkLost):
    """A frame or ack carries another epoch or step than the one that is due."""


class EpDeadline(EpLinkLost):
    """A wait passed its deadline."""


class EpEpochClosed(EpLinkLost):
    """The epoch's closed flag was raised while waiting."""


class EpDiverged(EpLinkLost):
    """Ranks that must be alike differ: another outcome, collective count, slot state or digest."""


class EpRankFailed(EpLinkLost):
    """A rank's execution failed in a way that the others did not (a device error, out of memory, a bug)."""


class EpHandshakeRefused(EpLinkLost):
    """A rank differs from the head in something that matters; the message names rank, field and both values."""
