"""The command links of one epoch: the head's end of all of them, and a worker's end of its own.

Deadlines are in `time.monotonic()` seconds, None for no end. Every wait ends within 20 ms of the peer's end of stream
(`EpPeerGone`), the epoch's closed flag (`EpEpochClosed`) or the deadline (`EpDeadline`).
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from time import monotonic

import msgspec

from protocol.ack import (
    ACK_SIZE,
    VERDICT_SIZE,
    Ack,
    AckStatus,
    Verdict,
    expect_step,
    pack_ack,
    pack_verdict,
    unpack_ack,
    unpack_verdict,
)
from protocol.address import connect
from protocol.channel import Channel, Wait
from protocol.codec import BLOB_HEADER, blob_size, open_blob, pack_blob
from protocol.errors import (
    EpDiverged,
    EpEpochClosed,
    EpFrameCorrupt,
    EpHandshakeRefused,
    EpOutOfOrder,
    EpPeerGone,
    EpRankFailed,
    brief,
)
from protocol.hello import ANSWER_SIZE, Hello, Reason, pack_hello, token_hash, unpack_answer
from protocol.preamble import preamble_size, unpack
from protocol.verdict import FAILURE_GRACE

MAX_BLOB = 1 << 20
"""Most bytes of a handshake message."""


class HeadLinks:
    """The head's ends, in rank order from rank 1. None in a world of one. Owns the channels."""

    def __init__(self, channels: Sequence[Channel], epoch: int, closed: Callable[[], bool]) -> None:
        self._channels = list(channels)
        self._epoch = epoch
        self._closed = closed
        self._failed_since: float | None = None
        self._poller = select.poll()
        self._by_fd = {channel.fd: channel for channel in self._channels}
        for channel in self._channels:
            self._poller.register(channel.fd, select.POLLIN)

    @property
    def world(self) -> int:
        """Ranks, the head included."""
        return len(self._channels) + 1

    @property
    def answered(self) -> bool:
        """Whether every worker's next ack has been read by a `check` or a `send`, so that `collect` waits for none."""
        return all(len(channel.buffer) >= ACK_SIZE for channel in self._channels)

    def check(self) -> None:
        """Without waiting: raise `EpPeerGone` if a worker's stream has ended, `EpEpochClosed` if the epoch has.

        A rank that leaves closes its link before it cuts its collectives short: what the device had computed before a check that
        passes is right. `EpRankFailed` when a worker has acked a failure a second ago while this rank, still busy, has not: it
        waits in vain.
        """
        if self._closed():
            raise EpEpochClosed("the epoch was closed")
        while self._read(0):
            pass  # the end of a stream comes behind the acks that are unread
        for channel in self._channels:
            if channel.eof:
                raise _gone_after(channel, _next_ack(channel))
        self._check_failed()

    def _check_failed(self) -> None:
        failed = [ack for channel in self._channels if (ack := _next_ack(channel)) is not None and ack.failed]
        if not failed:
            self._failed_since = None
        elif self._failed_since is None:
            self._failed_since = monotonic()
        elif monotonic() - self._failed_since > FAILURE_GRACE:
            causes = "; ".join(f"rank {ack.rank}: {ack.message}" for ack in failed)
            raise EpRankFailed(f"step {failed[0].step} failed on some ranks while others still run it: {causes}")

    def send(self, data: bytes, deadline: float | None = None) -> None:
        """Send a frame to every worker. Acks that come meanwhile are read, so a worker that still acks is no deadlock."""
        late: dict[int, int] = {}
        for channel in self._channels:
            if channel.eof:
                raise channel.gone()
            sent = channel.send_some(data)
            if sent < len(data):
                late[channel.fd] = sent
        if late:
            self._send_rest(data, late, deadline)

    def collect(
        self, step: int, deadline: float | None, *, vote: bool = False, failed_at: float | None = None, leaving: bool = False
    ) -> list[Ack]:
        """The workers' acks of `step`, in rank order: votes with `vote`, results otherwise.

        Once a rank has failed (`failed_at`: the head itself, when) the others have one second, then `EpRankFailed`. With `leaving`
        (SHUTDOWN) a worker may close its link after its ack; otherwise that is `EpPeerGone`.
        """
        acks: dict[int, Ack] = {}
        wait = Wait(self._closed, deadline, lambda: self._missing(step, vote, acks))
        if failed_at is not None:
            wait.shorten(failed_at + FAILURE_GRACE, EpRankFailed)
        while True:
            for rank, channel in enumerate(self._channels, 1):
                if rank in acks:
                    continue
                if len(channel.buffer) >= ACK_SIZE:
                    ack = acks[rank] = self._ack(rank, channel, step, vote)
                    if ack.failed:
                        wait.shorten(monotonic() + FAILURE_GRACE, EpRankFailed)
                elif channel.eof:
                    raise channel.gone()
            if len(acks) == len(self._channels):
                return [acks[rank] for rank in range(1, self.world)]
            if not leaving:
                self._check_acked(acks)
            self._read(wait.slice())

    def send_verdict(self, step: int, commit: bool, deadline: float | None = None) -> None:
        """Tell every worker whether the command that was voted on takes effect."""
        self.send(pack_verdict(Verdict(self._epoch, step, commit)), deadline)

    def send_blob(self, payload: bytes, deadline: float | None = None) -> None:
        """Send a handshake message to every worker."""
        self.send(pack_blob(payload), deadline)

    def collect_blobs(self, deadline: float | None) -> list[bytes]:
        """One handshake message of every worker, in rank order."""
        blobs = []
        for channel in self._channels:
            what = f"the handshake of {channel.peer}"
            blobs.append(_receive_blob(channel, Wait(self._closed, deadline, what.__str__)))
        return blobs

    def exchange(self, own: bytes, deadline: float | None) -> list[bytes]:
        """Every rank's bytes on every rank, in rank order; it returns when all have given theirs."""
        shares = [own, *self.collect_blobs(deadline)]
        self.send_blob(msgspec.msgpack.encode(shares), deadline)
        return shares

    def close(self) -> None:
        """Close every link; idempotent. Workers see the end of their stream."""
        for channel in self._channels:
            channel.close()

    def _ack(self, rank: int, channel: Channel, step: int, vote: bool) -> Ack:
        ack = unpack_ack(channel.take(ACK_SIZE))
        # A failure that is read here no longer counts: a later one has a second of its own.
        self._failed_since = None
        expect_step(f"ack of rank {rank}", ack, self._epoch, step)
        if ack.rank != rank:
            raise EpDiverged(f"ack on the link of rank {rank} says rank {ack.rank}")
        if vote != (ack.status in (AckStatus.VOTE_YES, AckStatus.VOTE_NO)) and not ack.failed:
            due = "a vote" if vote else "a result"
            raise EpOutOfOrder(f"rank {rank} acked step {step} with {ack.status.name}, due is {due}")
        return ack

    def _check_acked(self, acks: dict[int, Ack]) -> None:
        """A rank that is gone ends the step at once, even when its ack has come: the others may wait for it in a collective."""
        for rank, ack in acks.items():
            channel = self._channels[rank - 1]
            if channel.eof:
                raise _gone_after(channel, ack)

    def _missing(self, step: int, vote: bool, acks: dict[int, Ack]) -> str:
        ranks = ", ".join(str(rank) for rank in range(1, self.world) if rank not in acks)
        failed = "".join(f"; rank {rank} failed: {ack.message}" for rank, ack in acks.items() if ack.failed)
        return f"{'votes' if vote else 'acks'} of epoch {self._epoch} step {step} from ranks {ranks}{failed}"

    def _read(self, milliseconds: int) -> bool:
        """Read what has come, up to 64 KiB a link; False when nothing has."""
        ready = self._poller.poll(milliseconds)
        for fd, _ in ready:
            channel = self._by_fd[fd]
            channel.fill()
            if channel.eof:
                # An ended stream stays readable; polling it further would spin.
                self._poller.unregister(fd)
        return bool(ready)

    def _send_rest(self, data: bytes, late: dict[int, int], deadline: float | None) -> None:
        """Finish a send that some kernels took in part; `late` maps descriptors to bytes sent."""
        wait = Wait(self._closed, deadline, lambda: f"{', '.join(self._by_fd[fd].peer for fd in late)} to read a frame")
        try:
            for fd in late:
                self._poller.modify(fd, select.POLLIN | select.POLLOUT)
            with memoryview(data) as view:
                while late:
                    for fd, event in self._poller.poll(wait.slice()):
                        channel = self._by_fd[fd]
                        if event & ~select.POLLOUT:
                            channel.fill()
                        if channel.eof:
                            raise channel.gone()
                        if event & select.POLLOUT and fd in late:
                            late[fd] += channel.send_some(view[late[fd] :])
                            if late[fd] == len(data):
                                del late[fd]
                                self._poller.modify(fd, select.POLLIN)
        finally:
            for fd in late:
                self._poller.modify(fd, select.POLLIN)


class WorkerLink:
    """A worker's end. Owns the channel."""

    def __init__(self, channel: Channel, rank: int, epoch: int, closed: Callable[[], bool], version: int = 2) -> None:
        self._channel = channel
        self._closed = closed
        self._version = version
        self._head = preamble_size(version)
        self.rank = rank
        self.epoch = epoch

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        rank: int,
        epoch: int,
        token: str,
        deadline: float | None,
        closed: Callable[[], bool],
        version: int = 2,
    ) -> WorkerLink:
        """Connect and say hello; raises `EpHandshakeRefused` when the head refuses it."""
        channel = Channel(connect(address, deadline, closed), "the head")
        try:
            wait = Wait(closed, deadline, lambda: f"the head at {address} to answer hello")
            channel.send_all(pack_hello(Hello(version, epoch, rank, token_hash(token))), wait)
            channel.need(ANSWER_SIZE, wait)
            reason = unpack_answer(channel.take(ANSWER_SIZE))
            if reason is not Reason.ACCEPTED:
                raise EpHandshakeRefused(f"the head at {address} refused rank {rank} of epoch {epoch}: {reason.name}")
        except BaseException:
            channel.close()
            raise
        return cls(channel, rank, epoch, closed, version)

    def fileno(self) -> int:
        """The descriptor to poll while idle."""
        return self._channel.fd

    def receive(self, deadline: float | None = None) -> bytes:
        """The bytes of exactly one frame. Its preamble is verified before its length is believed."""
        channel = self._channel
        wait = Wait(self._closed, deadline, lambda: "a frame of the head")
        channel.need(self._head, wait)
        with memoryview(channel.buffer) as view:
            size = self._head + unpack(view[: self._head], self._version).payload_size
        channel.need(size, wait)
        return channel.take(size)

    def ack(self, ack: Ack, deadline: float | None = None) -> None:
        """Answer the command: a vote or a result."""
        self._channel.send_all(pack_ack(ack), Wait(self._closed, deadline, lambda: "the head to read an ack"))

    def verdict(self, step: int, deadline: float | None = None) -> bool:
        """Whether the command of `step`, which this rank has voted on, takes effect."""
        self._channel.need(VERDICT_SIZE, Wait(self._closed, deadline, lambda: f"the verdict on step {step}"))
        verdict = unpack_verdict(self._channel.take(VERDICT_SIZE))
        expect_step("verdict", verdict, self.epoch, step)
        return verdict.commit

    def send_blob(self, payload: bytes, deadline: float | None = None) -> None:
        """Send a handshake message."""
        self._channel.send_all(pack_blob(payload), Wait(self._closed, deadline, lambda: "the head to read the handshake"))

    def receive_blob(self, deadline: float | None) -> bytes:
        """A handshake message of the head."""
        return _receive_blob(self._channel, Wait(self._closed, deadline, lambda: "the head's handshake"))

    def exchange(self, own: bytes, deadline: float | None) -> list[bytes]:
        """As `HeadLinks.exchange`."""
        self.send_blob(own, deadline)
        blob = self.receive_blob(deadline)
        try:
            shares = msgspec.msgpack.decode(blob, type=list[bytes])
        except (msgspec.DecodeError, msgspec.ValidationError) as fault:
            raise EpFrameCorrupt(f"shares of all ranks: {brief(fault)}") from fault
        if len(shares) <= self.rank or shares[self.rank] != own:
            raise EpFrameCorrupt(f"the shares of {len(shares)} ranks do not hold that of rank {self.rank}")
        return shares

    def check(self) -> None:
        """Without waiting: raise `EpPeerGone` if the head's stream has ended, `EpEpochClosed` if the epoch has."""
        if self._closed():
            raise EpEpochClosed("the epoch was closed")
        self._channel.fill()
        if self._channel.eof:
            raise self._channel.gone()

    def close(self) -> None:
        """Close the link; idempotent. The head sees the end of the stream."""
        self._channel.close()


def _next_ack(channel: Channel) -> Ack | None:
    """The ack that has come and is not read yet, if there is one."""
    return unpack_ack(channel.buffer[:ACK_SIZE]) if len(channel.buffer) >= ACK_SIZE else None


def _gone_after(channel: Channel, ack: Ack | None) -> EpPeerGone:
    """The error that says that the peer is gone, and what it has said last of the command under way, if anything."""
    said = "" if ack is None else f", after it acked {ack.status.name} {ack.message}".rstrip()
    return EpPeerGone(f"{channel.gone()}{said}")


def _receive_blob(channel: Channel, wait: Wait) -> bytes:
    channel.need(BLOB_HEADER.size, wait)
    size = blob_size(channel.buffer, MAX_BLOB)
    channel.need(size, wait)
    return open_blob(channel.take(size))
