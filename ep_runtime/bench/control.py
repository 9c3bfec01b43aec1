"""`control`: what the head's end of the command links costs a step, by number of ranks. The ranks do no arithmetic.

Every rank is a real link: a stream socket whose other end reads the frame, verifies its preamble and acks it, as a worker does. The
ranks share `--processes` processes, so time on the clock says little on few cores; what is reported of the head is processor time.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ep_runtime.bench import report
from ep_runtime.bench.session import numbers
from protocol.ack import Ack, AckStatus, pack_ack
from protocol.channel import never_closed
from protocol.commands import BATCH, Decode, Shutdown, Span, Wanted
from protocol.frame import decode, encode
from protocol.links import HeadLinks
from protocol.listener import Listener
from protocol.verdict import judge, raise_outcome

EPOCH = 0
PEERS = "ep_runtime.bench.control_peers"
DEADLINE_SECONDS = 120.0
SETTLE_SECONDS = 0.002
"""For all acks to come while the head does something else, as it does when it launches its own step."""

WARM_STEPS = 20
COLUMNS = {
    "ranks": "ranks",
    "rows": "rows",
    "frame_bytes": "frame bytes",
    "encode_us": "encode",
    "send_us": "send",
    "collect_us": "acks",
    "judge_us": "judge",
    "head_us": "head us",
    "waiting_us": "acks awaited",
    "elapsed_us": "elapsed",
    "worker_us": "a worker",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    parser.add_argument("--ranks", type=numbers, default=[2, 4, 8, 16, 32, 64], metavar="N,N", help="the head included")
    parser.add_argument("--rows", type=numbers, default=[1, 32, 256], metavar="N,N", help="sequences of a decode step")
    parser.add_argument("--steps", type=int, default=300, help="timed, for each cell (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="which the ranks but the head share (default: %(default)s)")
    parser.add_argument("--tcp", action="store_true", help="as between hosts, instead of Unix sockets")
    parser.add_argument("--out", type=Path, help="file for the result as JSON")


def run(options: argparse.Namespace) -> None:
    """Measure every cell, print the table and write the JSON."""
    rows = []
    for world in options.ranks:
        with open_links(world, min(options.processes, world - 1), tcp=options.tcp) as links:
            rows += [measure(links, count, options.steps) for count in options.rows]
    way = "TCP" if options.tcp else "Unix sockets"
    about = {"links": way, "processes": options.processes, "steps": options.steps}
    result = {"benchmark": "control", **report.environment(), **about, "rows": rows}
    print(f"{result['processor']}, {result['cores']} cores; {way}, the ranks in {options.processes} process(es)")
    print("microseconds of processor time of the head a step, medians; elapsed: of the clock; a worker: frame decoded, ack packed")
    print(report.table(rows, COLUMNS))
    report.write(options.out, result)


@contextmanager
def open_links(world: int, processes: int, *, tcp: bool) -> Iterator[Numbered]:
    """Links to `world - 1` ranks, which share so many processes; they end with a SHUTDOWN."""
    if world < 2:
        raise SystemExit("a link has two ends: at least 2 ranks")
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        address = "127.0.0.1:0" if tcp else f"unix:{folder}/links"
        with Listener(address) as listener:
            shares = [range(1 + at, world, processes) for at in range(processes)]
            children = [_start(listener.address, token, share) for share in shares]
            try:
                links = listener.accept(
                    world=world, epoch=EPOCH, token=token, deadline=_deadline(), closed=never_closed, on_refused=print
                )
                numbered = Numbered(links)
                yield numbered
                _end(numbered)
            except BaseException:
                for child in children:
                    child.kill()
                raise
            finally:
                statuses = [child.wait(DEADLINE_SECONDS) for child in children]
    if any(statuses):
        raise RuntimeError(f"the ranks' processes ended with {statuses}")


def measure(numbered: Numbered, rows: int, steps: int) -> dict[str, Any]:
    """One row of the table: medians over `steps` steps, first with the acks there already, then with the head waiting for them."""
    timer = StepTimer(numbered, rows)
    for _ in range(WARM_STEPS):
        timer.step(SETTLE_SECONDS)
    settled = [timer.step(SETTLE_SECONDS) for _ in range(steps)]
    waiting = [timer.step(0.0) for _ in range(steps)]
    row: dict[str, Any] = {"ranks": numbered.links.world, "rows": rows, "frame_bytes": timer.frame_bytes}
    parts = ("encode_us", "send_us", "collect_us", "judge_us")
    row |= {part: statistics.median(step[part] for step in settled) for part in parts}
    row["head_us"] = statistics.median(sum(step[part] for part in parts) for step in settled)
    row["waiting_us"] = statistics.median(step["collect_us"] for step in waiting)
    row["elapsed_us"] = statistics.median(step["elapsed_us"] for step in waiting)
    row["worker_us"] = statistics.median(timer.worker_us() for _ in range(steps))
    return row


class StepTimer:
    """Sends the steps of `rows` decoding sequences over the links, numbered on from the last one that was sent."""

    def __init__(self, numbered: Numbered, rows: int) -> None:
        self._numbered = numbered
        self._links = numbered.links
        self._rows = rows
        self._position = 1000
        self._frame = b""

    @property
    def frame_bytes(self) -> int:
        """Size of the last frame."""
        return len(self._frame)

    def step(self, pause_s: float) -> dict[str, float]:
        """Encode, send, pause, take the acks, judge them: microseconds of each."""
        number = self._numbered.take()
        self._position += 1
        spans = [
            Span(slot, self._position, 1, fed=True, sampled=True, wanted=Wanted.LAST, new_blocks=[]) for slot in range(self._rows)
        ]
        began = time.perf_counter_ns()
        marks = [time.thread_time_ns()]
        self._frame = encode(Decode(spans=spans), BATCH, epoch=EPOCH, step=number)
        marks.append(time.thread_time_ns())
        self._links.send(self._frame, _deadline())
        marks.append(time.thread_time_ns())
        if pause_s:
            time.sleep(pause_s)
        resumed = time.thread_time_ns()
        acks = [Ack(0, EPOCH, number, AckStatus.OK), *self._links.collect(number, _deadline())]
        collected = time.thread_time_ns()
        raise_outcome(judge(acks))
        judged = time.thread_time_ns()
        elapsed = time.perf_counter_ns() - began
        return {
            "encode_us": (marks[1] - marks[0]) / 1e3,
            "send_us": (marks[2] - marks[1]) / 1e3,
            "collect_us": (collected - resumed) / 1e3,
            "judge_us": (judged - collected) / 1e3,
            "elapsed_us": elapsed / 1e3,
        }

    def worker_us(self) -> float:
        """Microseconds in which a rank decodes the last frame and packs its ack, beside what the sockets cost it."""
        began = time.thread_time_ns()
        frame = decode(self._frame)
        pack_ack(Ack(1, frame.preamble.epoch, frame.preamble.step, AckStatus.OK))
        return (time.thread_time_ns() - began) / 1e3


class Numbered:
    """Links with the number of their next command: an epoch's steps have no gaps."""

    def __init__(self, links: HeadLinks) -> None:
        self.links = links
        self._next = 0

    def take(self) -> int:
        """The next command's number."""
        number, self._next = self._next, self._next + 1
        return number


def _start(address: str, token: str, ranks: Sequence[int]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", PEERS, address, ",".join(map(str, ranks))]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(token.encode())
    child.stdin.close()
    return child


def _end(numbered: Numbered) -> None:
    step = numbered.take()
    numbered.links.send(encode(Shutdown(), BATCH, epoch=EPOCH, step=step), _deadline())
    numbered.links.collect(step, _deadline(), leaving=True)
    numbered.links.close()


def _deadline() -> float:
    return time.monotonic() + DEADLINE_SECONDS
