"""Kernel benchmarks: `python -m ep_runtime.bench.kernels experts [--models 30b,80b-ep2] [--rows 1,8] [--out FILE] [--table FILE]`.

Needs a CUDA device and nothing else. `--out` gets everything as JSON, `--table` the tuning table of this device alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path

from ep_runtime.bench import kernel_experts
from ep_runtime.bench.compile_ahead import compile_share

DEFAULT_ROWS = "1,8,32,128,1024,4096,8192"


def main() -> None:
    """Run one suite and print its table."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.bench.kernels", description=__doc__)
    parser.add_argument("suite", choices=["experts"])
    parser.add_argument("--models", default=",".join(kernel_experts.MODELS), help="a comma between them (default: %(default)s)")
    parser.add_argument("--rows", default=DEFAULT_ROWS, help="a comma between them (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile ahead (0: none)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.jobs:
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            for failure in pool.imap_unordered(compile_share, [(at, options.jobs) for at in range(options.jobs)]):
                if failure:
                    print(failure, flush=True)
    report = lambda line: print(line, flush=True)  # noqa: E731
    result = kernel_experts.run(options.models.split(","), [int(rows) for rows in options.rows.split(",")], report)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))
    if options.table:
        options.table.write_text(json.dumps(result["table"], indent=1))


if __name__ == "__main__":
    main()
