"""`scale`: decode, prefill, throughput and start-up by number of ranks, for every model and layout of attention, in one command.

Every part runs in processes of its own under torchrun, with as many ranks as it measures; what is done is in --out at once, and a
part that is there already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ep_runtime.bench import plots, report
from ep_runtime.bench.configs import CONFIGS
from ep_runtime.bench.ending import ended
from ep_runtime.bench.scale_part import add_sizes
from ep_runtime.bench.scale_rows import DECODE, OTHERS, decode_rows, key, other_rows
from ep_runtime.bench.session import numbers
from ep_runtime.bench.tiny import write_tiny
from ep_runtime.config import ATTENTION_LAYOUTS

TINY = "tiny"
MODELS = ("qwen3-30b-a3b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b")
WORLDS = (1, 2, 4, 8)
SIZES = ("batch", "prompt_len", "new_tokens", "prefill", "prefill_len", "requests", "request_len", "request_tokens")
HANDED_ON = ("dtype", "device", "forward_mode", "threads", *SIZES)
LAST_WORDS = 8000
"""Characters of a failed part's output that are kept: what a rank says of its end, and then torchrun, which takes half of them."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one load of a model measures."""

    model: str
    layout: str
    ranks: int

    def name(self) -> dict[str, Any]:
        """As a result names it."""
        return {"model": self.model, "layout": self.layout, "ranks": self.ranks}

    def is_in(self, done: Sequence[Mapping[str, Any]]) -> bool:
        """Whether it is among the parts that did not fail."""
        return any(key(part) == key(self.name()) and "failed" not in part for part in done)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    names = ", ".join((*sorted(CONFIGS), TINY))
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAME,NAME", help=f"of {names} (default: %(default)s)")
    parser.add_argument("--layouts", default=",".join(ATTENTION_LAYOUTS), metavar="NAME,NAME", help="default: all that are served")
    parser.add_argument("--ranks", type=numbers, metavar="N,N", help="default: 1, 2, 4 and 8, up to the GPUs; 1 and 2 on a CPU")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--forward-mode", choices=["reference", "eager", "graph"])
    parser.add_argument("--threads", type=int, help="compute threads of each rank on the CPU")
    parser.add_argument("--no-collectives", action="store_true", help="leave out the table of collectives")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds of a part (default: %(default)s)")
    add_sizes(parser)
    report.add_output_arguments(parser)


def run(options: argparse.Namespace) -> None:
    """Measure what is not in --out yet, print the tables, write the JSON and the plot."""
    models, layouts = options.models.split(","), options.layouts.split(",")
    worlds = options.ranks or default_worlds(options.device)
    result = earlier(options.out) or {"benchmark": "scale", **report.environment(), "parts": [], "collectives": []}
    for part in (Part(model, layout, ranks) for model in models for layout in layouts for ranks in worlds):
        if not part.is_in(result["parts"]):
            result["parts"] = [done for done in result["parts"] if key(done) != key(part.name())]
            result["parts"].append(measure_part(part, options))
            report.write(options.out, result)
    for ranks in worlds if not options.no_collectives else []:
        if ranks > 1 and all(table["ranks"] != ranks for table in result["collectives"]):
            result["collectives"].append(measure_collectives(ranks, options))
            report.write(options.out, result)
    print(report.table(decode_rows(result["parts"]), DECODE))
    print(f"\n{report.table(other_rows(result['parts']), OTHERS)}")
    plots.save(options.plot, result)
    failed = [part for part in (*result["parts"], *result["collectives"]) if "failed" in part]
    if failed:
        raise SystemExit(f"{len(failed)} parts failed: {failed[0]['failed']}")


def default_worlds(device: str) -> list[int]:
    """Ranks of a machine: 1, 2, 4 and 8, as far as its GPUs go."""
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    return [ranks for ranks in WORLDS if ranks <= (gpus or 2)]


def earlier(path: Path | None) -> dict[str, Any] | None:
    """What an earlier run has written, if there is anything. Raises ValueError for the result of another benchmark."""
    if path is None or not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if result.get("benchmark") != "scale":
        raise ValueError(f"{path} is no result of scale")
    return result


def measure_part(part: Part, options: argparse.Namespace) -> dict[str, Any]:
    """The part's result; "failed" holds the last words of one that did not end well."""
    print(f"{part.model}, {part.layout}, {part.ranks} ranks", flush=True)
    with _source(part.model) as source:
        flags = [*source, "--attention-layout", part.layout, *handed_on(options)]
        found = run_ranks("ep_runtime.bench.scale_part", part.ranks, flags, options.limit)
    return {**found, **part.name()}


def measure_collectives(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """The table of `bench collectives` with so many ranks."""
    print(f"collectives, {ranks} ranks", flush=True)
    flags = ["collectives", "--device", options.device, "--rows", ",".join(map(str, options.batch))]
    return {**run_ranks("ep_runtime.bench", ranks, flags, options.limit), "ranks": ranks}


def handed_on(options: argparse.Namespace) -> list[str]:
    """The flags of a part that are those of the whole."""
    flags = []
    for name in HANDED_ON:
        value = getattr(options, name)
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            flags += [f"--{name.replace('_', '-')}", text]
    return flags


def run_ranks(module: str, ranks: int, flags: Sequence[str], limit: float) -> dict[str, Any]:
    """What `module` writes to --out when `ranks` processes run it; under "failed" its last words, if it fails or takes too long."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        command = [sys.executable, "-P", "-m", *launcher, module, *flags, "--out", str(out)]
        with log.open("wb") as words:
            process = subprocess.Popen(
                command,
                env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status = ended(process, limit)
        if status != 0 or not out.exists():
            said = log.read_text(encoding="utf-8", errors="replace").strip()[-LAST_WORDS:]
            return {"failed": f"{'it took too long' if status is None else f'exit status {status}'}: {said}"}
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@contextmanager
def _source(model: str) -> Iterator[list[str]]:
    """The flags that name a model: a published configuration, the tiny checkpoint, or a folder."""
    if model in CONFIGS:
        yield ["--config-name", model]
    elif model != TINY:
        yield ["--model", model]
    else:
        with tempfile.TemporaryDirectory(prefix="bench-tiny-") as folder:
            write_tiny(Path(folder))
            yield ["--model", folder]
