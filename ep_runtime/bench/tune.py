"""`tune`: tuning data of this kind of GPU, measured: expert kernels, linear layers of few rows, and the way of sums over ranks.

Every part checks its candidates against a reference, times them, and puts the best into one table, which the runtime reads.
A part runs in processes of its own. One that fails, or meets a wrong candidate, is named at the end; the others run all the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ep_runtime.bench.ending import ended
from ep_runtime.bench.experts_shapes import MODELS
from ep_runtime.bench.timing import need_gpu
from kernels.tuning import table_path

PARTS = ("experts", "few_rows", "sums")
SUM_ROWS = "1,8,32,128,256,512,1024,4096,8192"
"""Rows of the sums that are timed by both ways."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAME,NAME", help="default: %(default)s; sums need two GPUs")
    parser.add_argument(
        "--models", default=",".join(MODELS), metavar="NAME,NAME", help="whose experts (default: all that are known)"
    )
    parser.add_argument("--table", type=Path, help="default: that of this GPU in kernels/tuned; other entries in it are kept")
    parser.add_argument("--results", type=Path, default=Path("tuning"), help="folder for all times, as JSON (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    """Measure the parts one after the other. Ends with an error where there is no GPU, a part is unknown, or one failed."""
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise SystemExit(f"--parts has {', '.join(unknown)}; known are {', '.join(PARTS)}")
    need_gpu("tune")
    device, gpus = torch.cuda.get_device_name(), torch.cuda.device_count()
    table = options.table or table_path(device)
    if not table.exists():
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(json.dumps({"device": device, "entries": []}, indent=1) + "\n", encoding="utf-8")
    options.results.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in parts:
        if part == "sums" and gpus < 2:
            print("sums: left out, they need two GPUs", flush=True)
            continue
        # The second command of a part takes what the first has made.
        if any(ended(subprocess.Popen(each)) for each in commands(part, options.models, table, options.results, gpus)):
            failed.append(part)
    if failed:
        raise SystemExit(f"failed, or met a wrong candidate (see above): {', '.join(failed)}")
    print(f"the table is {table}")


def commands(part: str, models: str, table: Path, results: Path, gpus: int) -> list[Sequence[str]]:
    """What is run for a part of PARTS, in order."""
    python = [sys.executable, "-P", "-m"]
    out = str(results / f"{part}.json")
    match part:
        case "experts":
            return [[*python, "ep_runtime.bench.kernels", "experts", "--models", models, "--out", out, "--table", str(table)]]
        case "few_rows":
            return [[*python, "ep_runtime.bench.few_rows", "--out", out, "--table", str(table)]]
        case _:
            ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), "-m"]
            return [
                [*python, *ranks, "ep_runtime.bench", "collectives", "--rows", SUM_ROWS, "--out", out],
                [*python, "ep_runtime.bench.crossover", out, "--table", str(table)],
            ]
