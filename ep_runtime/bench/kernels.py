"""Kernel benchmarks: `python -m ep_runtime.bench.kernels experts [--models 30b,80b-ep2] [--rows 1,8] [--out FILE] [--table FILE]`.

Needs a CUDA device. Kernels are checked against float64 first; a wrong one is reported, and ends nothing but the exit status.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

from ep_runtime.bench import kernel_experts
from ep_runtime.bench.compile_ahead import compile_share
from ep_runtime.bench.experts_check import ROUTERS, SHAPES, check_router, check_shape

DEFAULT_ROWS = "1,8,32,128,1024,4096,8192"


def main() -> int:
    """Run one suite and print its table; 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.bench.kernels", description=__doc__)
    parser.add_argument("suite", choices=["experts"])
    parser.add_argument("--models", default=",".join(kernel_experts.MODELS), help="with commas (default: %(default)s)")
    parser.add_argument("--rows", default=DEFAULT_ROWS, help="with commas (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=15, help="processes that check and compile ahead (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="everything, as JSON")
    parser.add_argument("--table", type=Path, help="the tuning table of this device, for kernels/tuned/")
    options = parser.parse_args()
    began = time.monotonic()
    checks = prepare(options.jobs)
    good = sum(row["good"] for row in checks)
    report(f"checks: {good} of {len(checks)} good, after {time.monotonic() - began:.0f} s")
    result = kernel_experts.run(options.models.split(","), [int(rows) for rows in options.rows.split(",")], report)
    if options.out:
        options.out.write_text(json.dumps({"checks": checks, **result}, indent=1))
    if options.table:
        options.table.write_text(json.dumps(result["table"], indent=1) + "\n")
    return 0 if good == len(checks) else 1


def prepare(jobs: int) -> list[dict[str, Any]]:
    """Check all kernels, and compile all candidates into the compiler's cache, in `jobs` processes. Rows of the checks."""
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        shapes = pool.map_async(check_shape, SHAPES, chunksize=1)
        routers = pool.map_async(check_router, ROUTERS, chunksize=1)
        for failure in pool.imap_unordered(compile_share, [(at, 2 * jobs) for at in range(2 * jobs)]):
            if failure:
                report(f"does not compile: {failure}")
        checks = [row for rows in (*shapes.get(), *routers.get()) for row in rows]
    for row in checks:
        if not row["good"]:
            report(f"WRONG {row}")
    return checks


def report(line: str) -> None:
    """One line of the output, at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
