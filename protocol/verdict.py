"""What the acks of one command mean together: pure functions of all ranks' acks, the head's own among them (rank 0)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.ack import FATAL_CODES, Ack, AckStatus, ErrorCode
from protocol.errors import EpCommandFailed, EpDiverged, EpLinkLost, EpPeerGone, EpRankFailed
from protocol.sections import differing

FAILURE_GRACE = 1.0
"""Seconds in which the other ranks must ack once one rank has acked a failure."""


@dataclass(frozen=True, slots=True)
class Ok:
    """Every rank did the same. Of votes: every rank can, so commit."""

    collectives: int
    digest: int


@dataclass(frozen=True, slots=True)
class CommandFailed:
    """Every rank failed alike, or a vote was lost before anything changed. The ranks stay up."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The ranks differ, or one can no longer be trusted: the epoch ends with an error of class `kind`."""

    kind: type[EpLinkLost]
    message: str


Outcome = Ok | CommandFailed | LinkLost


def judge(acks: Sequence[Ack]) -> Outcome:
    """The outcome of a command that ran, from every rank's OK or FAILED."""
    lost = _untrusted(acks, (AckStatus.OK, AckStatus.FAILED))
    if lost is not None:
        return lost
    failed = [ack for ack in acks if ack.failed]
    if failed and len(failed) < len(acks):
        return LinkLost(EpRankFailed, f"only some ranks failed step {acks[0].step}: {_causes(failed)}")
    for what, values in (
        ("error classes", [ack.code.name for ack in acks]),
        ("collectives launched", [ack.collectives for ack in acks]),
        ("digests", [f"{ack.digest:#018x}" for ack in acks]),
    ):
        if len(set(values)) > 1:
            text = f"ranks differ in {what} of step {acks[0].step}: {_groups(acks, values)}{_sections(acks)}"
            return LinkLost(EpDiverged, f"{text}; {_causes(failed)}" if failed else text)
    if failed:
        return CommandFailed(acks[0].code, acks[0].message)
    return Ok(acks[0].collectives, acks[0].digest)


def judge_votes(acks: Sequence[Ack]) -> Outcome:
    """The outcome of the votes on a command: commit on `Ok`; on `CommandFailed` no rank changes anything."""
    lost = _untrusted(acks, (AckStatus.VOTE_YES, AckStatus.VOTE_NO))
    if lost is not None:
        return lost
    against = [ack for ack in acks if ack.status is AckStatus.VOTE_NO]
    if against:
        return CommandFailed(against[0].code, f"voted down: {_causes(against)}")
    return Ok(0, 0)


def raise_outcome(outcome: Outcome) -> Ok:
    """Return `Ok`; raise `EpCommandFailed`, or the link error, that the outcome stands for."""
    if isinstance(outcome, CommandFailed):
        raise EpCommandFailed(outcome.message)
    if isinstance(outcome, LinkLost):
        raise outcome.kind(outcome.message)
    return outcome


def _untrusted(acks: Sequence[Ack], allowed: tuple[AckStatus, ...]) -> LinkLost | None:
    """What ends the epoch whatever the other ranks say: a device or link error, or an answer to another question."""
    fatal = [ack for ack in acks if ack.code in FATAL_CODES]
    if fatal:
        # A lost link is somebody else's end, seen from here.
        kind = EpRankFailed if any(ack.code is ErrorCode.DEVICE for ack in fatal) else EpPeerGone
        return LinkLost(kind, f"step {acks[0].step}: {_causes(fatal)}")
    strange = [ack for ack in acks if ack.status not in allowed]
    if strange:
        named = ", ".join(status.name for status in allowed)
        return LinkLost(
            EpDiverged, f"step {acks[0].step} asks for {named}; {_groups(strange, [ack.status.name for ack in strange])}"
        )
    return None


def _causes(acks: Sequence[Ack]) -> str:
    return "; ".join(f"rank {ack.rank}: {ack.code.name} after {ack.collectives} collectives: {ack.message}" for ack in acks)


def _sections(acks: Sequence[Ack]) -> str:
    """The sections of a DIGEST that differ; nothing for acks of other commands."""
    if any(ack.failed for ack in acks):
        return ""
    found = differing([ack.message for ack in acks])
    return "".join(f"; {name}: {_groups(acks, values)}" for name, values in found.items())


def _groups(acks: Sequence[Ack], values: Sequence[object]) -> str:
    """`12 on ranks 0, 2; 11 on rank 1`, in order of first appearance."""
    ranks: dict[object, list[str]] = {}
    for ack, value in zip(acks, values, strict=True):
        ranks.setdefault(value, []).append(str(ack.rank))
    return "; ".join(f"{value} on rank{'s' * (len(who) > 1)} {', '.join(who)}" for value, who in ranks.items())
