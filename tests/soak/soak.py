"""A server of two ranks with a tiny model under steady load: nothing grows, and everything ends once."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from tests.soak.flat import Judgement, judge, judge_generations, table, thin
from tests.soak.load import Load, Tally
from tests.soak.sample import Sampler, Series
from tests.support.chaos_model import make_served_checkpoint
from tests.support.demo_server import DemoServer

RANKS = 2
SETTLE_SECONDS = 60.0
READY_SECONDS = 120.0
FLAGS = ("--max-model-len=256", "--max-num-seqs=8", "--num-blocks=256", "--max-num-batched-tokens=256")


@dataclass(frozen=True, slots=True)
class Settings:
    """`requests` spread over `seconds`; an engine is killed every `kill_every` seconds (0: never), ranks in turn."""

    seconds: float
    requests: int
    kill_every: float = 0.0
    seed: int = 1


@dataclass(slots=True)
class Outcome:
    """All that a run found out."""

    settings: Settings
    tally: Tally
    judged: list[Judgement]
    metrics: dict[str, float]
    kills: int
    series: list[Series]
    faults: list[str] = field(default_factory=list)

    def text(self) -> str:
        """For people."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.tally.ended.items()))
        lines = [
            table(self.judged),
            f"{sum(self.tally.ended.values())} requests ({kinds}), {self.tally.sequences} sequences finished, "
            f"{self.tally.left} left by their client, {self.tally.refused} times asked to come again, {self.kills} engines killed",
            *(f"FAULT: {fault}" for fault in self.faults),
        ]
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """For a JSON file; no more than a hundred and twenty points of memory a process."""
        curves = [{"role": one.role, "pid": one.pid, "seconds": thin(one.seconds), "pss": thin(one.memory)} for one in self.series]
        return asdict(replace(self, series=[])) | {"series": curves}


@contextlib.contextmanager
def open_server() -> Iterator[DemoServer]:
    """torchrun and two ranks of a tiny mixture, ready."""
    folder = Path(tempfile.mkdtemp(prefix="ep-"))
    try:
        model = make_served_checkpoint("qwen3_moe", "plain", folder / "checkpoint")
        server = DemoServer(folder, RANKS, f"--model={model}", *FLAGS)
        try:
            yield server
        finally:
            server.close()
    finally:
        shutil.rmtree(folder)


def read_metrics(server: DemoServer) -> dict[str, float]:
    """The metrics page; labels stay part of the names."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def newest_engine(server: DemoServer, rank: int) -> psutil.Process:
    """The engine that runs: the oldest below its supervisor, since a standby is started after it."""
    below = server.ranks()[rank].children(recursive=True)
    return min((one for one in below if "ep_runtime.engine.main" in one.cmdline()), key=lambda one: one.create_time())


def is_ready(server: DemoServer) -> bool:
    """/ready says 200."""
    try:
        with urllib.request.urlopen(f"{server.url}/ready", timeout=30) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def drive(server: DemoServer, load: Load, settings: Settings) -> int:
    """Stay until the load has ended, killing engines on the way; how many."""
    kills = 0
    began = time.monotonic()
    while load.running:
        load.join(1.0)
        assert server.torchrun.poll() is None, f"the server ended:\n{server.log()[-3000:]}"
        due = settings.kill_every > 0 and time.monotonic() - began > (kills + 1) * settings.kill_every
        if due and load.running:
            newest_engine(server, (kills + 1) % RANKS).kill()
            kills += 1
            until = time.monotonic() + READY_SECONDS
            time.sleep(0.5)  # readiness ends within that time
            while not is_ready(server):
                assert time.monotonic() < until, f"not ready after kill {kills}:\n{server.log()[-3000:]}"
                time.sleep(0.1)
    return kills


def settle(server: DemoServer) -> tuple[dict[str, float], list[str]]:
    """The metrics once nothing runs any more, and what is left if something does."""
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        metrics = read_metrics(server)
        left = {
            "sequences in the journal": metrics["ep_journal_sequences"],
            "running sequences": metrics["ep_running_sequences"],
            "waiting sequences": metrics["ep_waiting_sequences"],
            "blocks": metrics["ep_total_blocks"] - metrics["ep_free_blocks"],
            "slots": metrics["ep_total_slots"] - metrics["ep_free_slots"],
        }
        if not any(left.values()):
            return metrics, []
        if time.monotonic() > until:
            return metrics, [f"left over: {value:g} {name}" for name, value in left.items() if value]
        time.sleep(0.1)


def run_soak(settings: Settings) -> Outcome:
    """One run. `faults` of the outcome says what was not as it must be."""
    with open_server() as server:
        sampler = Sampler(psutil.Process(server.torchrun.pid)).start()
        load = Load(server.port, seed=settings.seed, count=settings.requests, seconds=settings.seconds).start()
        try:
            kills = drive(server, load, settings)
            metrics, faults = settle(server)
        finally:
            series = sampler.stop()
        log = server.log()
    judged = [found for one in series if (found := judge(one)) is not None]
    outcome = Outcome(settings, load.tally, judged, metrics, kills, series, faults)
    outcome.faults += load.tally.faults
    outcome.faults += [f"{one.role} ({one.pid}): {fault}" for one in judged for fault in one.faults]
    outcome.faults += judge_generations(judged)
    outcome.faults += count_ends(load.tally, metrics, settings.requests)
    if "Traceback" in log and not kills:
        outcome.faults.append(f"the server's log has an error:\n{log[log.index('Traceback') - 500 :][:3000]}")
    return outcome


def count_ends(tally: Tally, metrics: dict[str, float], requests: int) -> list[str]:
    """Each request ended once for its client, and each sequence once for the frontend."""
    faults = []
    asked = sum(tally.ended.values())
    if asked != requests:
        faults.append(f"{asked} of {requests} requests ended")
    ended = {name: int(value) for name, value in metrics.items() if name.startswith("ep_sequences_total")}
    total = sum(ended.values())
    # A client that left at once may have been gone before its sequence began.
    if not tally.sequences <= total <= tally.sequences + tally.left:
        faults.append(f"{tally.sequences} sequences finished and {tally.left} were left, the frontend counts {ended}")
    return faults
