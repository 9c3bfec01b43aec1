"""`collectives`: microseconds of each collective of the runtime by rows, each compared with the exact sum first. Under torchrun."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed

from ep_runtime.bench import plots, report
from ep_runtime.bench.collective_cells import DEADLINE_SECONDS, Cell, Problem, cpu_cells, gpu_cells
from ep_runtime.bench.session import numbers
from ep_runtime.engine.comm import GroupCommunicator, form_group, open_store
from ep_runtime.engine.main import pick_device
from ep_runtime.engine.peers import Peers
from ep_runtime.supervise.place import Place, read_place

# torch's type stubs leave out the rendezvous.
_torch: Any = distributed

SKEW_SECONDS = 300e-6
"""Most by which a rank begins a replay late, as ranks begin a step."""


class Ranks:
    """The ranks that torchrun started, and what they tell each other outside of what is measured."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._store = next(iter(_torch.rendezvous("env://")))[0]
        self._calls = itertools.count()
        self.group_store: Any = None
        self.rearm()

    def exchange(self, own: bytes) -> list[bytes]:
        """Everybody's bytes in rank order; returns when all have given theirs."""
        call = next(self._calls)
        self._store.set(f"bench-{call}-{self.place.rank}", own)
        return [bytes(self._store.get(f"bench-{call}-{rank}")) for rank in range(self.place.world)]

    def rearm(self) -> None:
        """What follows has its own DEADLINE_SECONDS."""
        self._deadline = time.monotonic() + DEADLINE_SECONDS

    def check(self) -> None:
        """Raise `TimeoutError` when the deadline has passed."""
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"a collective is not done after {DEADLINE_SECONDS:g} s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32, 64, 128, 256, 1024], metavar="N,N")
    parser.add_argument("--width", type=int, default=2048, help="elements of a row, bfloat16 (default: %(default)s)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--only", default="", help="collectives whose names contain this")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["default"],
        metavar="KEY=N,KEY=N",
        help="ways of the sums through peer memory, a column each: programs, line (words between the signals of programs), "
        "word_rows (most rows that are pushed in words), shots (1 or 2, of more rows), spins, pause (ns), reader (warps, thread, "
        "atomic); 'default' is what the runtime does",
    )
    parser.add_argument("--calls", type=int, default=97, help="calls of one replay, as sums of one step (default: %(default)s)")
    parser.add_argument("--replays", type=int, default=30, help="default: %(default)s")
    parser.add_argument(
        "--drift", type=int, default=4, help="matrix products by which a rank in turn is late (default: %(default)s)"
    )
    report.add_output_arguments(parser)


def run(options: argparse.Namespace) -> None:
    """Check, measure, and on rank 0 print the tables and write the JSON."""
    place = read_place(os.environ)
    if place.world < 2:
        raise SystemExit("collectives need ranks: torchrun --nproc-per-node 2 -m ep_runtime.bench collectives")
    device = pick_device(options.device, place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = Ranks(place)
    with torch.inference_mode():
        group = join(ranks, device)
        try:
            rows = list(measure_all(group, ranks, device, options))
        finally:
            group.close()
    if place.rank != 0:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    about = {key: getattr(options, key) for key in ("width", "calls", "drift")}
    result = {"benchmark": "collectives", **report.environment(), "ranks": place.world, "device": name, **about, "rows": rows}
    print(
        f"{place.world} ranks, {name}, rows of {options.width} in bfloat16; microseconds a call, median / p90 / most of the replays"
    )
    for collective in dict.fromkeys(row["collective"] for row in rows):
        lines, columns = tabulate([row for row in rows if row["collective"] == collective])
        print(f"\n{collective}\n{report.table(lines, columns)}", flush=True)
    report.write(options.out, result)
    plots.save(options.plot, result)


def join(ranks: Ranks, device: torch.device) -> GroupCommunicator:
    """The runtime's own group, through a store of rank 0's."""
    place = ranks.place
    address = ""
    if place.rank == 0:
        ranks.group_store, address = open_store("127.0.0.1", place.world)
    address = ranks.exchange(address.encode())[0].decode()
    return form_group(
        address,
        epoch=0,
        rank=place.rank,
        world=place.world,
        device=device,
        host="127.0.0.1",
        timeout_s=DEADLINE_SECONDS,
        check=ranks.check,
    )


def measure_all(
    group: GroupCommunicator, ranks: Ranks, device: torch.device, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One row for each number of rows, collective and variant."""
    problems = [Problem(rows, options.width, ranks.place.rank, ranks.place.world, device) for rows in options.rows]
    if device.type == "cuda":
        peers = [Peers(group.rank, group.world, device, torch.bfloat16, use) for use in ("sums", "logits")]
        bases = {problem.rows: busy_us(problem, group, options) for problem in problems}
        cells = gpu_cells(group, ranks.exchange, peers, problems, options.variants, options.only)
    else:
        bases = {}
        cells = cpu_cells(group, ranks.exchange, problems, options.only)
    for cell in cells:
        ranks.rearm()
        cell.check()
        if cell.captured:
            times = replayed_us(cell, bases[cell.problem.rows], group, ranks, options)
        else:
            times = eager_us(cell.call, group, ranks, device, options)
        cell.check()
        yield {"collective": cell.collective, "variant": cell.variant, "rows": cell.problem.rows, **summarise(times)}


def replayed_us(cell: Cell, base: float, group: GroupCommunicator, ranks: Ranks, options: argparse.Namespace) -> list[float]:
    """Microseconds a call for each replay of a graph like a decode step: matrix products between, in which ranks drift apart."""
    rank, world = ranks.place.rank, ranks.place.world

    def step() -> None:
        for call in range(options.calls):
            cell.problem.work(1 + (options.drift if call % world == rank else 0))
            cell.call()

    graph = capture(step)
    delays = random.Random(rank)
    times = []
    for _ in range(options.replays):
        ranks.exchange(b"")
        time.sleep(delays.uniform(0, SKEW_SECONDS))
        cell.call()  # takes up by how much the ranks are apart, which is no part of the calls that are timed
        times.append((timed_ms(graph.replay, group) * 1e3 - base) / options.calls)
    graph.reset()
    return times


def busy_us(problem: Problem, group: GroupCommunicator, options: argparse.Namespace) -> float:
    """Microseconds of a replay's matrix products alone: of all calls, on the rank that is late in each."""
    problem.work(1)
    graph = capture(lambda: problem.work(options.calls * (1 + options.drift)))
    times = [timed_ms(graph.replay, group) * 1e3 for _ in range(7)]
    graph.reset()
    return statistics.median(times)


def capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The step as a graph. What it launches has run before, so that nothing is compiled here."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph


def timed_ms(launch: Callable[[], object], group: GroupCommunicator) -> float:
    """Milliseconds on the device; waits for it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    launch()
    end.record()
    group.settle()
    return float(start.elapsed_time(end))


def eager_us(
    call: Callable[[], object], group: GroupCommunicator, ranks: Ranks, device: torch.device, options: argparse.Namespace
) -> list[float]:
    """Microseconds a call, for each replay: calls one after another, on the host's clock for a CPU, on the device's for a GPU."""

    def step() -> None:
        for _ in range(options.calls):
            call()

    times = []
    for _ in range(options.replays):
        ranks.exchange(b"")
        if device.type == "cuda":
            took = timed_ms(step, group) * 1e3
        else:
            started = time.perf_counter()
            step()
            took = (time.perf_counter() - started) * 1e6
        times.append(took / options.calls)
    return times


def summarise(times: Sequence[float]) -> dict[str, Any]:
    """Median, 90th percentile and most of some replays, and all of them."""
    ordered = sorted(times)
    return {
        "median_us": statistics.median(ordered),
        "p90_us": ordered[min(len(ordered) - 1, len(ordered) * 9 // 10)],
        "max_us": ordered[-1],
        "replays_us": [round(value, 2) for value in times],
    }


def tabulate(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """One collective's lines, a line for each number of rows and a column for each variant, and the columns' titles."""
    variants = dict.fromkeys(row["variant"] for row in rows)
    lines: dict[int, dict[str, Any]] = {}
    for row in rows:
        cell = f"{row['median_us']:.1f} / {row['p90_us']:.1f} / {row['max_us']:.1f}"
        lines.setdefault(row["rows"], {"rows": row["rows"]})[row["variant"]] = cell
    return [lines[count] for count in sorted(lines)], {"rows": "rows", **{name: name for name in variants}}
