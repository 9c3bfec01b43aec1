"""What every rank must have in common before the first collective of an epoch, and the exchange that makes sure of it."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from protocol.errors import EpFrameCorrupt, EpHandshakeRefused, brief
from protocol.links import HeadLinks, WorkerLink


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a rank is, in plain values that it has read itself.

    Hashes are hexadecimal text; `nccl` and `triton` are "" where absent.
    `device` names the kind of device, without its number: ranks on different kinds round differently. `rank`, `host` and the patch
    part of `python` are for messages alone.
    """

    protocol_version: int
    messages_version: int
    package: str
    python: str
    torch: str
    nccl: str
    triton: str
    config_hash: str
    model_config_hash: str
    manifest_hash: str
    layout: str
    tuning: str
    world: int
    slots: int
    blocks: int
    block_size: int
    device: str
    dtype: str
    rank: int
    host: str = ""


class Judgement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The head's answer to all ranks: the refusal, or None."""

    refused: str | None


_Kind = TypeVar("_Kind")
_INFORMATIVE = ("rank", "host")


def compare(head: Fingerprint, worker: Fingerprint) -> EpHandshakeRefused | None:
    """None, or the refusal that names the worker's rank, each field that differs, and both values."""
    differences = []
    for name in Fingerprint.__struct_fields__:
        if name in _INFORMATIVE:
            continue
        ours, theirs = getattr(head, name), getattr(worker, name)
        if (_minor(ours) != _minor(theirs)) if name == "python" else (ours != theirs):
            differences.append(f"{name} is {brief(repr(theirs))}, on the head {brief(repr(ours))}")
    if not differences:
        return None
    where = f" ({brief(worker.host)})" if worker.host else ""
    return EpHandshakeRefused(f"rank {worker.rank}{where} differs from the head: {'; '.join(differences)}")


def head_handshake(links: HeadLinks, own: Fingerprint, deadline: float | None) -> None:
    """Compare every worker with the head, and tell all of them; raises `EpHandshakeRefused` with every refusal in rank order."""
    refusals = []
    for rank, blob in enumerate(links.collect_blobs(deadline), 1):
        worker = _decode(blob, Fingerprint, f"fingerprint of rank {rank}")
        refusal = compare(own, worker)
        if worker.rank != rank:
            refusals.append(f"rank {rank} differs from the head: rank is {worker.rank}, its link says {rank}")
        if refusal is not None:
            refusals.append(str(refusal))
    text = "; ".join(refusals) or None
    links.send_blob(msgspec.msgpack.encode(Judgement(refused=text)), deadline)
    if text is not None:
        raise EpHandshakeRefused(text)


def worker_handshake(link: WorkerLink, own: Fingerprint, deadline: float | None) -> None:
    """Send this rank's fingerprint and wait for the head's judgement on all; raises `EpHandshakeRefused` with its text."""
    link.send_blob(msgspec.msgpack.encode(own), deadline)
    judgement = _decode(link.receive_blob(deadline), Judgement, "judgement of the head")
    if judgement.refused is not None:
        raise EpHandshakeRefused(judgement.refused)


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _decode(blob: bytes, kind: type[_Kind], what: str) -> _Kind:
    try:
        return msgspec.msgpack.decode(blob, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as fault:
        raise EpFrameCorrupt(f"{what}: {brief(fault)}") from fault
