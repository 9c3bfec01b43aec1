"""`startup`: seconds from the start of the first process to ready, by phase; offline, and of a server that answers /ready."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from ep_runtime.bench import report
from ep_runtime.bench.demo import run_child
from ep_runtime.bench.served import Served
from ep_runtime.bench.served_flags import server_flags
from ep_runtime.bench.session import add_model_arguments, llm_settings, model_folder

PHASES = ("spawn", "import", "prepare", "load", "compile", "capture")
COLUMNS = {"way": "way", "ranks": "ranks", **{phase: f"{phase} s" for phase in PHASES}, "ready": "ready s"}
START_SECONDS = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    add_model_arguments(parser)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=1, help="starts of each way; the caches of the first serve the others")
    parser.add_argument("--no-server", action="store_true", help="offline alone")
    parser.add_argument("--flag", action="append", default=[], help="one more flag of the server, as --flag=--name=value")


def run(options: argparse.Namespace) -> None:
    """Start, measure, print the table and write the JSON."""
    with model_folder(options) as (model, name, load_format):
        rows = [start_offline(options, model, name, load_format) for _ in range(options.repeat)]
        rows += [start_server(options, model, name, load_format) for _ in range(0 if options.no_server else options.repeat)]
    result = {"benchmark": "startup", **report.environment(), "model": name, "ranks": options.ranks, "rows": rows}
    print(f"{name}, {options.ranks} ranks, load format {load_format}, {options.max_num_seqs} sequences at most")
    print(report.table(rows, COLUMNS))
    print("spawn: until rank 0's Python runs, torchrun included; prepare: device, memory plan and the meeting of the ranks")
    print("compile: what kernels take longer than weights")
    report.write(options.out, result)


def start_offline(options: argparse.Namespace, model: Path, name: str, load_format: str) -> dict[str, Any]:
    """An `LLM` on all ranks, in processes of its own. Raises BenchFailed."""
    settings = llm_settings(options, sequences=options.max_num_seqs, length=options.max_model_len)
    settings |= {"served_model_name": name, "load_format": load_format}
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as temporary:
        out = Path(temporary) / "out.json"
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks), "-m"]
        module = ["ep_runtime.bench.startup_rank", str(model), json.dumps(settings), str(out)]
        began = time.perf_counter()
        run_child([*(launcher if options.ranks > 1 else []), *module], threads=1, timeout=START_SECONDS)
        seen = json.loads(out.read_text(encoding="utf-8"))
    phases = {
        "spawn": seen["began"] - began,
        "import": seen["imported"] - seen["began"],
        "prepare": seen["ready"] - seen["imported"] - seen["load"] - seen["compile"] - seen["capture"],
        "load": seen["load"],
        "compile": seen["compile"],
        "capture": seen["capture"],
    }
    return {"way": "offline", "ranks": options.ranks, **phases, "ready": seen["ready"] - began}


def start_server(options: argparse.Namespace, model: Path, name: str, load_format: str) -> dict[str, Any]:
    """torchrun and all its processes, until /ready answers 200."""
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as temporary:
        folder = Path(temporary)
        flags, _ = server_flags(
            model,
            name,
            folder,
            device=options.device,
            dtype=options.dtype,
            load_format=load_format,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            more=options.flag,
        )
        began = time.perf_counter()
        served = Served(options.ranks, flags, folder / "log")
        ready = time.perf_counter() - began
        served.close()
    return {"way": "server", "ranks": options.ranks, "ready": ready}
