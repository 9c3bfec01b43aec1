"""`python -m ep_runtime.bench.few_rows [--only WORD] [--rows 1,8] [--out FILE] [--table FILE]`: linear layers of few rows, tuned.

Needs a CUDA device. Every candidate is compiled and compared with float64 in several processes at once; then each is timed beside
the library, between neighbours that launch and wait as those of a decode step do, since what counts is what it adds to a step.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from ep_runtime.bench.timing import COPY_BYTES_PER_SECOND, need_gpu, time_us
from kernels.few_rows import FewRowsConfig, few_rows_shape
from kernels.few_rows_triton import linear_rows
from kernels.tuning import merge_entries

SHAPES = {
    "30b qkv, 2 ranks": (2048, 2560),  # and next, 4 ranks
    "30b qkv": (2048, 5120),
    "out, 2 ranks": (2048, 2048),
    "out": (4096, 2048),
    "next delta, 2 ranks": (2048, 6176),
    "next delta": (2048, 12352),
    "next qkv, 2 ranks": (2048, 4608),
    "next qkv": (2048, 9216),
    "router 128": (2048, 128),
    "router 256": (2048, 256),
    "router 512": (2048, 512),
    "shared gate_up": (2048, 1024),
    "shared down": (512, 2048),  # and out, 8 ranks
    "30b qkv, 4 ranks": (2048, 1280),
    "30b qkv, 8 ranks": (2048, 768),
    "out, 4 ranks": (1024, 2048),
    "next delta, 4 ranks": (2048, 3088),
    "next delta, 8 ranks": (2048, 1544),
    "next qkv, 8 ranks": (2048, 1536),
}
"""Name -> depth and columns of the weight. Qwen3.5-35B and Qwen3-Next-80B, `next`, have the same ones."""

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)

DATA_BYTES = 256 << 20
"""Weights of all calls of a graph: several times the L2 cache."""

NEIGHBOUR_CYCLES = 5000
"""How long a neighbour takes at least, about 3 us: as a sum over two ranks does, or attention of short sequences."""

MARGIN = 0.98
"""What a kernel may take of the library's time to be chosen."""


ONE_ROW_TILES = ((8, 4), (4, 4), (4, 2), (2, 2))
"""Columns and warps of the way `rows`."""

FEW: tuple[tuple[int, ...], ...] = (
    *((16, 2048, 0, 8, 1, 8, 1), (16, 512, 0, 4, 1, 4, 3), (16, 256, 0, 4, 1, 4, 4)),
    *((64, 512, 0, 1, 4, 4, 1), (64, 256, 0, 1, 8, 4, 1), (64, 256, 0, 1, 8, 8, 1)),
)
MANY: tuple[tuple[int, ...], ...] = (
    *((16, 256, 64, 1, 1, 4, 3), (16, 128, 64, 1, 1, 4, 4), (32, 64, 64, 1, 1, 4, 6), (32, 128, 64, 1, 1, 4, 4)),
    *((32, 128, 64, 1, 2, 4, 4), (64, 128, 64, 1, 1, 4, 4), (32, 128, 128, 1, 1, 8, 4), (64, 128, 128, 1, 1, 8, 4)),
    *((64, 512, 0, 1, 4, 4, 1), (64, 512, 0, 1, 4, 8, 1), (64, 256, 0, 1, 8, 8, 1), (32, 256, 0, 4, 1, 4, 3)),
    *((64, 128, 0, 1, 1, 8, 4), (64, 128, 0, 1, 2, 4, 4), (64, 64, 0, 1, 4, 4, 6), (128, 64, 0, 1, 1, 8, 5)),
)
"""Of the way `tiles`: columns, depth of a step, rows, parts, splits, warps, stages. One stage: one step, of any depth."""


def candidates(rows: int, depth: int) -> list[FewRowsConfig]:
    """Configurations worth a try; those that lost everywhere should go."""
    found = [FewRowsConfig(way="rows", block_n=n, warps=warps) for n, warps in ONE_ROW_TILES if rows <= 4]
    for n, k, block_rows, parts, splits, warps, stages in (*(FEW if rows <= 16 else ()), *(MANY if rows >= 16 else ())):
        if stages == 1:
            k = triton.next_power_of_2(triton.cdiv(depth, splits))
        if splits * k <= depth:
            tile = FewRowsConfig(way="tiles", block_n=n, block_k=k, block_rows=block_rows, parts=parts, splits=splits, warps=warps)
            found.append(replace(tile, stages=stages))
    return list(dict.fromkeys(found))


def check(job: tuple[int, int, FewRowsConfig]) -> str:
    """What is wrong with a configuration for some rows and depth, or nothing; leaves it compiled in the cache."""
    rows, depth, config = job
    torch.manual_seed(0)
    x, weight = _normal(rows, depth), _normal(2048 + 32, depth)
    exact = x.double() @ weight.double().T
    turns = torch.zeros(len(weight), dtype=torch.int32, device="cuda")
    try:
        results = [_poisoned(partial(linear_rows, x, weight, None, config, turns, pdl=True), exact.numel()) for _ in range(3)]
        error = float((results[0].double() - exact).norm() / exact.norm())
        same = all(torch.equal(results[0], result) for result in results)
    except Exception as failure:  # one candidate must not end the others
        return f"{failure!r:.300}"
    return "" if error < 4e-3 and same and not turns.any() else f"error {error:.2e}, same bits {same}"


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def _poisoned(run: Callable[[], torch.Tensor], numel: int) -> torch.Tensor:
    """The result in memory that held NaN."""
    torch.full((numel,), float("nan"), dtype=torch.bfloat16, device="cuda")
    return run()


@triton.jit
def _neighbour_kernel(x, out, width, cycles, BLOCK: tl.constexpr):
    """A copy that takes its time."""
    at = tl.arange(0, BLOCK)
    here = at < width
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    began = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    value = tl.load(x + tl.program_id(0) * width + at, mask=here)
    now = began
    while now - began < cycles:
        now = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(out + tl.program_id(0) * width + at, value, mask=here)


class Chain:
    """Calls of one linear layer over different weights, each after a neighbour that writes its input, as a graph."""

    def __init__(self, rows: int, weights: list[torch.Tensor]) -> None:
        columns, depth = weights[0].shape
        self.weights = weights
        self.source, self.x = _normal(rows, depth), _normal(rows, depth)
        self.turns = torch.zeros(columns, dtype=torch.int32, device="cuda")
        self.alone = time_us([self._neighbour] * len(self.weights), replays=5)

    def _neighbour(self) -> None:
        rows, depth = self.x.shape
        block = triton.next_power_of_2(depth)
        _neighbour_kernel[(rows,)](self.source, self.x, depth, NEIGHBOUR_CYCLES, BLOCK=block, num_warps=4, launch_pdl=True)

    def added_us(self, call: Callable[[torch.Tensor, torch.Tensor], object]) -> float:
        """Microseconds that a call of x and a weight adds to a neighbour's."""

        def both(weight: torch.Tensor) -> None:
            self._neighbour()
            call(self.x, weight)

        return time_us([partial(both, weight) for weight in self.weights], replays=5) - self.alone


def tune(shape: tuple[int, int], all_rows: Sequence[int], right: Callable[[int, int, FewRowsConfig], bool]) -> dict[str, Any]:
    """Times by rows, and the entry of a tuning table that they make."""
    depth, columns = shape
    floor = columns * depth * 2 / COPY_BYTES_PER_SECOND * 1e6
    weights = [_normal(columns, depth) for _ in range(max(2, min(24, DATA_BYTES // (2 * columns * depth))))]
    timed, entry = [], {}
    for rows in all_rows:
        chain = Chain(rows, weights)
        library = chain.added_us(functional.linear)
        configs = [config for config in candidates(rows, depth) if right(rows, depth, config)]
        times = sorted(((chain.added_us(partial(_call, config, chain.turns)), config) for config in configs), key=itemgetter(0))
        best, config = times[0]
        entry[str(rows)] = (config if best < MARGIN * library else FewRowsConfig(way="library")).plain()
        timed.append({"rows": rows, "floor": floor, "library": library, "times": [(us, c.plain()) for us, c in times]})
        print(f"{shape} T {rows:3} floor {floor:5.1f} library {library:6.2f} best {best:6.2f} | {_brief(times)}", flush=True)
    return {"timed": timed, "entry": {"kernel": "few_rows", "shape": few_rows_shape(depth, columns, "bfloat16"), "rows": entry}}


def _call(config: FewRowsConfig, turns: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear_rows(x, weight, None, config, turns, pdl=True)


def _brief(times: Sequence[tuple[float, FewRowsConfig]]) -> str:
    return ", ".join(f"{us:.2f} {' '.join(map(str, config.plain().values()))}" for us, config in times[:3])


def main() -> int:
    """Check, time, print; 1 if a candidate was wrong or failed."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.bench.few_rows", description=__doc__)
    parser.add_argument("--only", default="", help="shapes whose names contain this")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="with commas (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=15, help="processes that check and compile (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="all times, as JSON")
    parser.add_argument("--table", type=Path, help="a tuning table of this device, of kernels/tuned/, which the entries join")
    options = parser.parse_args()
    need_gpu("few_rows")
    shapes = [shape for name, shape in SHAPES.items() if options.only in name]
    all_rows = [int(rows) for rows in options.rows.split(",")]
    depths = dict.fromkeys(depth for depth, _ in shapes)
    jobs = [(rows, depth, config) for rows in all_rows for depth in depths for config in candidates(rows, depth)]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        wrong = {job: what for job, what in zip(jobs, pool.map(check, jobs), strict=True) if what}
    print(f"{len(jobs)} checked", *(f"WRONG {job}: {what}" for job, what in wrong.items()), sep="\n", flush=True)
    results = []
    for shape in shapes:
        results.append(tune(shape, all_rows, lambda *job: job not in wrong))
        if options.out:
            options.out.write_text(json.dumps(results))
    if options.table:
        table = json.loads(options.table.read_text(encoding="utf-8"))
        if table["device"] != torch.cuda.get_device_name():
            raise ValueError(f"{options.table} is the table of {table['device']}")
        table["entries"] = merge_entries(table["entries"], [result["entry"] for result in results])
        options.table.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
