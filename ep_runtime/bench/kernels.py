"""Kernel benchmarks: `python -m ep_runtime.bench.kernels experts [--models 30b,80b-ep2] [--rows 1,8] [--out FILE] [--table FILE]`.

Needs a CUDA device. Kernels are checked against float64 first; a wrong one is reported, and ends nothing but the exit status.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from ep_runtime.bench import kernel_experts
from ep_runtime.bench.compile_ahead import compile_share
from ep_runtime.bench.experts_check import ROUTERS, SHAPES, check_router, check_shape
from ep_runtime.bench.experts_shapes import MODELS
from ep_runtime.bench.kernel_experts import report
from ep_runtime.bench.timing import need_gpu
from kernels.tuning import merge_entries

DEFAULT_ROWS = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192"


def main() -> int:
    """Run one suite and print its table; 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.bench.kernels", description=__doc__)
    parser.add_argument("suite", choices=["experts"])
    parser.add_argument("--models", default=",".join(MODELS), help="with commas (default: %(default)s)")
    parser.add_argument("--rows", default=DEFAULT_ROWS, help="with commas (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=15, help="processes that check and compile ahead (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="everything, as JSON")
    parser.add_argument("--table", type=Path, help="a tuning table of this device, for kernels/tuned/; other shapes in it are kept")
    options = parser.parse_args()
    need_gpu("kernels")
    began = time.monotonic()
    checks = prepare(options.jobs)
    good = sum(row["good"] for row in checks)
    report(f"checks: {good} of {len(checks)} good, after {time.monotonic() - began:.0f} s")
    router, *models = time_all(options.models.split(","), [int(rows) for rows in options.rows.split(",")])
    report(f"done after {time.monotonic() - began:.0f} s")
    table = made_table(models, options.table)
    if options.out:
        result = {"checks": checks, "router": router, "models": models, "table": table}
        options.out.write_text(json.dumps(result, indent=1, default=str))  # torch's dtypes by their names
    if options.table and models:
        options.table.write_text(json.dumps(table, indent=1) + "\n")
    return 0 if good == len(checks) else 1


def made_table(models: list[Any], path: Path | None) -> dict[str, Any]:
    """The entries of the timed models, and the others of the table that is at `path`. Raises ValueError for another device's."""
    new = [each["entry"] for each in models]
    device = models[0]["device"] if models else None
    if path is None or not path.exists() or not models:
        return {"device": device, "entries": new}
    old = json.loads(path.read_text(encoding="utf-8"))
    if old["device"] != device:
        raise ValueError(f"{path} is the table of {old['device']}, this is {device}")
    return {"device": device, "entries": merge_entries(old["entries"], new)}


def prepare(jobs: int) -> list[dict[str, Any]]:
    """Check all kernels, and compile all candidates into the compiler's cache, in `jobs` processes. Rows of the checks."""
    with _executor(jobs) as pool:
        checking: list[tuple[object, Future[list[dict[str, Any]]]]] = [(shape, pool.submit(check_shape, shape)) for shape in SHAPES]
        checking += [(router, pool.submit(check_router, router)) for router in ROUTERS]
        compiling = [("compilation", pool.submit(compile_share, (at, jobs))) for at in range(jobs)]
        failures = [_result(*each) for each in compiling]
        rows = [_result(*each) or [{"what": each[0], "good": False}] for each in checking]
    for failure in filter(None, failures):
        report(f"does not compile: {failure}")
    checks = [row for of_shape in rows for row in of_shape]
    for row in checks:
        if not row["good"]:
            report(f"WRONG {row}")
    return checks


def time_all(models: list[str], rows: list[int]) -> list[Any]:
    """The router's times, then those of every model that could be timed, one process after the other."""
    with _executor(1) as pool:
        waiting: list[tuple[str, Future[Any]]] = [("router", pool.submit(kernel_experts.time_router))]
        waiting += [(key, pool.submit(kernel_experts.time_model, key, rows)) for key in models]
        router, *timed = (_result(*each) for each in waiting)
    return [router, *filter(None, timed)]


def _executor(jobs: int) -> ProcessPoolExecutor:
    """Every task has a process of its own: a device error leaves no later one without a device."""
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1)


def _result(label: object, future: Future[Any]) -> Any:
    """What the task returns; None, with a line of output, if it failed."""
    try:
        return future.result()
    except Exception as error:  # one task must not end the run
        report(f"FAILED {label}: {error!r}")
        return None


if __name__ == "__main__":
    sys.exit(main())
