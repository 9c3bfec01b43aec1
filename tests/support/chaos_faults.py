"""The faults of a chaos run: what is done, and how many epochs it ends."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.support.chaos_server import ChaosServer

UNREADY_SECONDS = 0.5
"""How long /ready may say 200 after an engine has died."""
LOOKS_SECONDS = 0.5
"""Beyond a deadline: where the ranks are is told four times a second, and judged as often."""
FAILURE_SECONDS = 3.0
"""And after a rank has failed that goes on living: the others get a second to fail alike."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` at `ranks`, once the wave's long stream has `after` tokens. `epochs` is how many epochs it ends."""

    kind: str
    ranks: tuple[int, ...]
    after: int
    epochs: int = 1


OUTSIDE = (
    ("kill", (1,), 1),
    ("kill", (2,), 1),
    ("kill", (3,), 1),
    ("kill", (0,), 1),
    ("kill", (0,), 1),
    ("kill", (1, 3), 1),
    ("kill", (0, 2), 1),
    ("kill in load", (2,), 1),
    ("kill in load", (0,), 1),
    ("kill in recovery", (1, 3), 2),
    ("kill in recovery", (2, 0), 2),
    ("stop supervisor", (3,), 1),
    ("pause", (2,), 0),
)
"""What no request can have caused."""
INSIDE = (
    ("stop", (1,), 1),
    ("stop", (0,), 1),
    ("prepare", (3,), 1),
    ("prepare", (0,), 1),
    ("prepare everywhere", (0, 1, 2, 3), 0),
    ("execute", (2,), 1),
    ("execute", (0,), 1),
    ("execute late", (1,), 1),
    ("execute everywhere", (0, 1, 2, 3), 0),
    ("corrupt", (0,), 1),
    ("corrupt", (3,), 1),
    ("close", (2,), 1),
)
"""What a request may have caused, as far as anyone can see."""


def plan_faults(rng: random.Random) -> list[Fault]:
    """All of them in random order, one from inside and one from outside in turn, each after a random token."""
    outside, inside = list(OUTSIDE), list(INSIDE)
    rng.shuffle(outside)
    rng.shuffle(inside)
    turns = [one for at in range(max(len(inside), len(outside))) for one in [*inside[at : at + 1], *outside[at : at + 1]]]
    return [Fault(kind, ranks, rng.randint(1, 25), epochs) for kind, ranks, epochs in turns]


def inject(
    server: ChaosServer, fault: Fault, *, command_timeout: float, marker: Sequence[int], send_marked: Callable[[], None]
) -> float:
    """Do it; returns the monotonic time from which the server may not call itself ready in the epoch that it ends.

    Faults everywhere need ranks that agree on when: they wait for the request with the tokens `marker`, which `send_marked` sends.
    Those in a pass over images or in a prefill wait for its images, which are to be encoded, in more than one chunk.
    """
    rank, *others = fault.ranks
    match fault.kind:
        case "kill":
            return server.kill(*fault.ranks) + UNREADY_SECONDS
        case "stop":
            return server.stop(rank) + command_timeout + LOOKS_SECONDS + UNREADY_SECONDS
        case "pause":
            server.stop(rank)
            time.sleep(command_timeout / 4)
            server.go_on(rank)
        case "stop supervisor":
            at = server.stop_supervisor(rank)
            server.wait("the end of its epoch", lambda: not server.is_ready())
            server.ranks[rank].send_signal(signal.SIGCONT)
            return at + command_timeout + LOOKS_SECONDS + UNREADY_SECONDS
        case "kill in load":
            server.arm("load", rank)
            with server.expect("load", rank):
                at = server.kill(rank)
            server.kill(rank)
            return at + UNREADY_SECONDS
        case "kill in recovery":
            server.arm("form", *others)
            with server.expect("form", *others):
                at = server.kill(rank)
            server.kill(*others)
            return at + UNREADY_SECONDS
        case "kill in encode":
            with server.expect("encode", 0):
                server.arm("encode", 0, wait=0 in fault.ranks)
                send_marked()
            return server.kill(*fault.ranks) + UNREADY_SECONDS
        case "kill in prefill":
            with server.expect("shown", rank):
                server.arm("shown", rank)
                send_marked()
            return server.kill(*fault.ranks) + UNREADY_SECONDS
        case "prepare everywhere" | "execute everywhere":
            kind = fault.kind.split()[0]
            with server.expect(kind, *fault.ranks):
                server.arm(kind, *fault.ranks, marker=list(marker))
                send_marked()
        case "execute late":
            with server.expect("execute", rank):
                server.arm("execute", rank, late=True)
        case kind:
            with server.expect(kind, rank):
                server.arm(kind, rank)
    return time.monotonic() + FAILURE_SECONDS
