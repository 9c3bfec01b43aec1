"""What ranks must have in common, field by field, and the exchange over real links."""

from __future__ import annotations

import socket
import threading
from time import monotonic

import msgspec
import pytest

from protocol.channel import Channel
from protocol.errors import EpError, EpFrameCorrupt, EpHandshakeRefused, EpPeerGone
from protocol.handshake import Fingerprint, compare, head_handshake, worker_handshake
from protocol.links import HeadLinks, WorkerLink

HEAD = Fingerprint(
    protocol_version=2,
    messages_version=1,
    package="2026.11.0",
    python="3.11.7",
    torch="2.13.0+cpu",
    nccl="",
    triton="3.6.0",
    config_hash="aa",
    model_config_hash="bb",
    manifest_hash="cc",
    layout="replicated",
    tuning="",
    world=3,
    slots=8,
    blocks=64,
    block_size=16,
    device="cpu",
    dtype="float32",
    rank=0,
    host="alpha",
)
UNCOMPARED = ("rank", "host")
COMPARED = [name for name in Fingerprint.__struct_fields__ if name not in UNCOMPARED]


def rank(number, **changed):
    return msgspec.structs.replace(HEAD, rank=number, host="beta", **changed)


def other(name):
    value = getattr(HEAD, name)
    return value + 1 if isinstance(value, int) else {"python": "3.12.7"}.get(name, value + "x")


def test_equal_ranks_on_different_hosts_agree():
    assert compare(HEAD, rank(2)) is None


@pytest.mark.parametrize("name", COMPARED)
def test_every_field_that_matters_is_refused_by_name_with_both_values(name):
    refusal = compare(HEAD, rank(2, **{name: other(name)}))
    assert isinstance(refusal, EpHandshakeRefused)
    assert str(refusal) == f"rank 2 (beta) differs from the head: {name} is {other(name)!r}, on the head {getattr(HEAD, name)!r}"


def test_all_differences_are_named():
    text = str(compare(HEAD, rank(1, slots=9, dtype="bfloat16")))
    assert text == "rank 1 (beta) differs from the head: slots is 9, on the head 8; dtype is 'bfloat16', on the head 'float32'"


@pytest.mark.parametrize(("version", "agrees"), [("3.11.14", True), ("3.11.7+", True), ("3.12.7", False), ("3.1.7", False)])
def test_python_may_differ_in_its_patch_alone(version, agrees):
    assert (compare(HEAD, rank(1, python=version)) is None) is agrees


def never():
    return False


def exchange(*fingerprints):
    """Run the handshake of a head and these workers; returns each one's error or None, the head first."""
    pairs = [socket.socketpair() for _ in fingerprints]
    deadline = monotonic() + 20
    links = HeadLinks([Channel(head, f"rank {number}") for number, (head, _) in enumerate(pairs, 1)], 1, never)
    errors: list[EpError | None] = [None] * (len(pairs) + 1)

    def shake(number, link, fingerprint):
        try:
            worker_handshake(link, fingerprint, deadline)
        except EpError as error:
            errors[number] = error
        finally:
            link.close()

    threads = [
        threading.Thread(target=shake, args=(number, WorkerLink(Channel(sock, "the head"), number, 1, never), fingerprint))
        for number, ((_, sock), fingerprint) in enumerate(zip(pairs, fingerprints, strict=True), 1)
    ]
    for thread in threads:
        thread.start()
    try:
        head_handshake(links, HEAD, deadline)
    except EpError as error:
        errors[0] = error
    finally:
        links.close()
        for thread in threads:
            thread.join(20)
    return errors


def test_exchange_of_equal_ranks():
    assert exchange(rank(1), rank(2)) == [None, None, None]


def test_exchange_tells_every_rank_of_every_refusal():
    errors = exchange(rank(1, torch="2.11.0"), rank(2, blocks=63))
    text = (
        "rank 1 (beta) differs from the head: torch is '2.11.0', on the head '2.13.0+cpu'; "
        "rank 2 (beta) differs from the head: blocks is 63, on the head 64"
    )
    assert [type(error) for error in errors] == [EpHandshakeRefused] * 3
    assert [str(error) for error in errors] == [text] * 3


def test_a_rank_that_says_another_number_than_its_link_is_refused():
    assert "rank 1 differs from the head: rank is 2, its link says 1" in str(exchange(rank(2), rank(2))[0])


def test_a_fingerprint_of_another_shape_is_corrupt():
    class Older(msgspec.Struct):
        torch: str = "2.13.0+cpu"

    error, left = exchange(Older())
    assert isinstance(error, EpFrameCorrupt)
    assert "fingerprint of rank 1" in str(error)
    assert isinstance(left, EpPeerGone)


def test_a_world_of_one_agrees_with_itself():
    head_handshake(HeadLinks([], 1, never), HEAD, None)
