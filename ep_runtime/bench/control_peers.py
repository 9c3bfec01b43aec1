"""The ranks of `bench control`: `python -m ep_runtime.bench.control_peers ADDRESS RANK,RANK`, with the token on standard input.

One process holds the links of all its ranks, and answers each frame as soon as it has come. Nothing is computed.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Sequence

from protocol.ack import Ack, AckStatus
from protocol.channel import never_closed
from protocol.commands import Cmd
from protocol.links import WorkerLink
from protocol.preamble import preamble_size, unpack

EPOCH = 0
VERSION = 2
DEADLINE_SECONDS = 120.0


def serve(links: Sequence[WorkerLink]) -> None:
    """Ack every frame on every link until each has had its SHUTDOWN."""
    # The first may have been read together with the answer to hello, and polling would not show it.
    by_fd = {link.fileno(): link for link in links if answer(link)}
    poller = select.poll()
    for fd in by_fd:
        poller.register(fd, select.POLLIN)
    while by_fd:
        for fd, _ in poller.poll():
            if not answer(by_fd[fd]):
                poller.unregister(fd)
                by_fd.pop(fd).close()


def answer(link: WorkerLink) -> bool:
    """Take the frame that is due and ack it; False when it was SHUTDOWN."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    preamble = unpack(link.receive(deadline)[: preamble_size(VERSION)], VERSION)
    link.ack(Ack(link.rank, preamble.epoch, preamble.step, AckStatus.OK), deadline)
    return preamble.cmd != Cmd.SHUTDOWN


def main() -> None:
    """Connect every rank, then serve."""
    address, ranks = sys.argv[1:]
    token = sys.stdin.read()
    deadline = time.monotonic() + DEADLINE_SECONDS
    serve(
        [
            WorkerLink.connect(address, rank=int(rank), epoch=EPOCH, token=token, deadline=deadline, closed=never_closed)
            for rank in ranks.split(",")
        ]
    )


if __name__ == "__main__":
    main()
