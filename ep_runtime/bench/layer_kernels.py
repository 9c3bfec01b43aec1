"""`python -m ep_runtime.bench.layer_kernels [--only WORD] [--jobs N] [--out FILE]`: all kernels of a layer but the experts.

Needs a CUDA device. Every candidate is compiled and compared with the reference, in several processes at once; then each is timed,
alone on the device, by replays of a graph. A candidate or a problem that fails is printed and ends nothing but the exit status.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ep_runtime.bench.layer_problem import Problem
from ep_runtime.bench.layer_problems import PROBLEMS
from ep_runtime.bench.report import environment, table, write
from ep_runtime.bench.timing import floor_us, need_gpu, time_us

COLUMNS = {
    "name": "kernel",
    "floor_us": "floor us",
    "default_us": "default us",
    "best_us": "best us",
    "ratio": "best/floor",
    "gbytes": "GB/s",
    "tflops": "TFLOP/s",
    "error": "error",
    "config": "best config",
}


def main() -> int:
    """Check, time, print; 1 if a candidate was wrong or failed."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.bench.layer_kernels", description=__doc__)
    parser.add_argument("--only", default="", help="problems whose names contain this")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile and check (default: %(default)s)")
    parser.add_argument(
        "--budget", type=float, default=170.0, help="seconds after which no family of kernels is begun (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="everything, as JSON")
    options = parser.parse_args()
    need_gpu("layer_kernels")
    names = [name for name in PROBLEMS if options.only in name]
    began = time.monotonic()
    checks = dict(zip(names, run_all(check, names, options.jobs), strict=True))
    print(f"checked and compiled after {time.monotonic() - began:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for family in dict.fromkeys(name.partition(" ")[0] for name in names):
        members = [(name, checks[name]) for name in names if name.partition(" ")[0] == family]
        if time.monotonic() - began > options.budget:
            print(f"NOT TIMED {family}: the budget is spent", flush=True)
            continue
        (timed,) = run_all(measure_all, [members], 1)
        rows += timed if isinstance(timed, list) else [{"name": family, "config": timed}]
    print(table(rows, COLUMNS))
    write(options.out, {"environment": environment(), "checks": checks, "rows": rows})
    return (
        0
        if all(isinstance(errors, list) and all(isinstance(error, float) for error in errors) for errors in checks.values())
        else 1
    )


def run_all(task: Any, items: Sequence[Any], jobs: int) -> list[Any]:
    """Results of a task for each item, each in a process of its own, or the text of its failure."""
    results = []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for item, future in [(item, pool.submit(task, item)) for item in items]:
            try:
                results.append(future.result())
            except Exception as error:  # a device error spoils its own process alone
                print(f"FAILED {item}: {error!r:.300}", flush=True)
                results.append(f"{error!r:.300}")
    return results


def check(name: str) -> list[float | str]:
    """For each candidate its largest relative error, or what is wrong with it."""
    torch.manual_seed(0)
    problem = PROBLEMS[name]()
    found: list[float | str] = []
    expected = problem.expected()
    for config in problem.configs():
        problem.reset()
        try:
            error = largest_error(problem.run(config, 0), expected)
        except Exception as failure:  # one candidate must not end the others
            found.append(f"{failure!r:.200}")
        else:
            found.append(error if error <= problem.tolerance else f"error {error:.2e}")
        if isinstance(found[-1], str):
            print(f"WRONG {name} {config}: {found[-1]}", flush=True)
    return found


def largest_error(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Of several results, the largest norm of the difference over the norm of what is expected; infinite for NaN."""
    errors = [(g.double() - e.double()).norm() / e.double().norm() for g, e in zip(got, expected, strict=True)]
    error = float(torch.stack(errors).max())
    return error if error == error else float("inf")


def measure_all(items: Sequence[tuple[str, list[float | str] | str]]) -> list[dict[str, Any]]:
    """`measure` of several problems, or what went wrong with one."""
    rows: list[dict[str, Any]] = []
    for name, errors in items:
        try:
            rows.append(measure(name, errors))
        except Exception as failure:  # one problem must not end the others
            print(f"FAILED {name}: {failure!r:.300}", flush=True)
            rows.append({"name": name, "config": f"{failure!r:.100}"})
        torch.cuda.empty_cache()
    return rows


def measure(name: str, errors: list[float | str] | str) -> dict[str, Any]:
    """Time every candidate that was right."""
    torch.manual_seed(0)
    problem: Problem = PROBLEMS[name]()
    if isinstance(errors, str):
        raise ValueError(errors)
    times: list[tuple[float, str]] = []
    for config, error in zip(problem.configs(), errors, strict=True):
        if isinstance(error, float):
            calls = [partial(problem.run, config, number) for number in range(problem.sets)]
            times.append((time_us(calls * max(1, 24 // len(calls))), str(config)))
    best, config = min(times)
    floor = floor_us(problem.bytes, problem.flops)
    return {
        "name": name,
        "floor_us": floor,
        "default_us": times[0][0],
        "best_us": best,
        "ratio": best / floor,
        "gbytes": problem.bytes / best / 1e3,
        "tflops": problem.flops / best / 1e6,
        "error": max(error for error in errors if isinstance(error, float)),
        "config": config,
        "all": sorted(times),
    }


if __name__ == "__main__":
    sys.exit(main())
