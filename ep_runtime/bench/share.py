"""`share`: the steps of one rank of several, alone on one device: all that they take but the collectives, without the other ranks.

The rank holds what it would hold among them: its experts, its heads, its part of the vocabulary, in dummy weights. A sum over ranks
is its own part of it, and costs nothing. The router chooses among all experts, and tokens are drawn evenly, so that about its share
of the choices is the rank's; its experts that are hit are counted. It is rank 0: the first ranks have the most experts, and where
all have as many, chance alone makes one busier than another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ep_runtime.bench import bandwidth, report
from ep_runtime.bench.configs import PUBLISHED, write_config
from ep_runtime.bench.cost_models import load_machine, model_costs
from ep_runtime.bench.cost_shares import MACHINE, check_shares
from ep_runtime.bench.floor import step_bytes, weight_bytes
from ep_runtime.bench.scale import MODELS, TINY
from ep_runtime.bench.session import numbers
from ep_runtime.bench.share_steps import ShareSteps, Step, count_choices, step_times
from ep_runtime.bench.tiny import CONFIG as TINY_CONFIG
from ep_runtime.config import Facts, RuntimeConfig, resolve
from ep_runtime.engine.main import collect_garbage, pick_device
from ep_runtime.engine.rank import RankModel, load_rank
from ep_runtime.supervise.place import own_cores
from model.parallel import Parallel

LAYOUTS = ("tensor", "replicated")
"""Layouts in which any rank has a part of every step."""

COLUMNS = {
    "model": "model",
    "layout": "layout",
    "ranks": "ranks",
    "what": "step",
    "measured_ms": "ms",
    "floor_ms": "floor ms",
    "predicted_ms": "predicted",
    "off": "off",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    names = ", ".join((*PUBLISHED, TINY))
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAME,NAME", help=f"of {names} (default: %(default)s)")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), metavar="NAME,NAME", help="default: %(default)s")
    parser.add_argument("--ranks", type=numbers, default=[4, 8], metavar="N,N", help="of how many it is one (default: 4,8)")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32, 128, 256], metavar="N,N", help="sequences of decode steps")
    parser.add_argument("--context", type=int, default=160, help="positions of each (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=2, help="prompts in a step of prompts (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=4096, help="of each (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="decode steps that are timed (default: %(default)s)")
    parser.add_argument("--prompt-steps", type=int, default=8, help="likewise, of prompts (default: %(default)s)")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--forward-mode", choices=["reference", "eager", "graph"])
    parser.add_argument("--threads", type=int, help="compute threads on the CPU")
    parser.add_argument("--out", type=Path, help="file for the result as JSON, kept after each part; parts that it has stay")


def run(options: argparse.Namespace) -> None:
    """Measure each model, layout and number of ranks that is not in --out yet; print the steps, and what the model says of them."""
    result: dict[str, Any] = {"benchmark": "share", **report.environment(), "parts": []}
    if options.out is not None and options.out.exists():
        result = json.loads(options.out.read_text(encoding="utf-8"))
    device = pick_device(options.device, 0)
    for name in options.models.split(","):
        for layout in options.layouts.split(","):
            for ranks in options.ranks:
                key = {"model": name, "attention_layout": layout, "ranks": ranks}
                if not any(key.items() <= part.items() for part in result["parts"]):
                    print(f"{name}, {layout}, rank 0 of {ranks}", flush=True)
                    measured = bandwidth.measure(device)
                    with open_rank(name, layout, ranks, device, options) as rank:
                        result["parts"].append(key | measure(rank, measured, options))
                    report.write(options.out, result)
    models = {part["model"]: model_costs(part["model"]) for part in result["parts"] if part["model"] in PUBLISHED}
    print(report.table(check_shares(load_machine(MACHINE), models, result), COLUMNS))


@contextmanager
def open_rank(name: str, layout: str, ranks: int, device: torch.device, options: argparse.Namespace) -> Iterator[RankModel]:
    """Rank 0 of `ranks` of a model, loaded as its engine would load it, with dummy weights; its memory is given back."""
    with tempfile.TemporaryDirectory(prefix="bench-share-") as folder:
        if name == TINY:
            (Path(folder) / "config.json").write_text(json.dumps(TINY_CONFIG), encoding="utf-8")
        else:
            write_config(name, Path(folder))
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "attention_layout": layout,
            "max_num_seqs": max(*options.batch, options.prompts),
            "max_model_len": max(options.context, options.prompt_len),
            "max_num_batched_tokens": max(*options.batch, options.prompts * options.prompt_len),
        }
        settings |= {field: getattr(options, field) for field in ("dtype", "device", "forward_mode", "threads")}
        config = RuntimeConfig(model=folder, **settings)
        facts = Facts(gpus=torch.cuda.device_count(), cores=own_cores(), world=ranks, local_world=ranks)
        rank = load_rank(resolve(config, facts), Parallel(0, ranks), device, local_ranks=1)
    collect_garbage()
    try:
        yield rank
    finally:
        rank.loaded.close()
        if device.type == "cuda":
            torch.cuda.empty_cache()


@torch.inference_mode()
def measure(rank: RankModel, bytes_per_second: float, options: argparse.Namespace) -> dict[str, Any]:
    """A part's result: what ran, and its steps."""
    steps = ShareSteps(rank, batches=options.batch, context=options.context, prompts=options.prompts, prompt_len=options.prompt_len)
    try:
        return {
            **about(rank, bytes_per_second),
            "decode": [decode_row(rank, steps, batch, bytes_per_second, options) for batch in options.batch],
            "prompts": prompt_row(rank, steps, options),
        }
    finally:
        steps.close()


def about(rank: RankModel, bytes_per_second: float) -> dict[str, Any]:
    """What ran, and where."""
    gpu = rank.device.type == "cuda"
    return {
        "rank": rank.parallel.rank,
        "dtype": str(rank.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(rank.device) if gpu else f"cpu, {torch.get_num_threads()} threads",
        "forward_mode": rank.config.forward_mode,
        "weight_bytes": rank.loaded.report.nbytes,
        "load_seconds": round(rank.loaded.report.seconds, 2),
        "bandwidth_gb_s": round(bytes_per_second / 1e9, 1),
    }


def decode_row(
    rank: RankModel, steps: ShareSteps, batch: int, bytes_per_second: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Decode steps of one batch, beside the floor of the experts that they hit."""
    dtype, parallel, loaded = str(rank.dtype).removeprefix("torch."), rank.parallel, rank.loaded
    weights = weight_bytes(loaded.config, parallel, loaded.placement, loaded.report.nbytes, dtype)
    found = timed(rank, steps.decode(batch), steps.tokens(options.steps, batch))
    moved = step_bytes(weights, rank.spec, loaded.placement, dtype, batch=batch, context=options.context, hits=found["hits"])
    floor = moved.milliseconds(bytes_per_second)
    figures = {"batch": batch, "context": options.context, "floor_ms": floor, "ratio": found["step_ms"] / floor}
    return figures | {"bytes": asdict(moved)} | found


def prompt_row(rank: RankModel, steps: ShareSteps, options: argparse.Namespace) -> dict[str, Any]:
    """Steps of whole prompts."""
    rows = options.prompts * options.prompt_len
    figures = {"rows": rows, "prompt_len": options.prompt_len}
    return figures | timed(rank, steps.prompts(), steps.tokens(options.prompt_steps, rows))


def timed(rank: RankModel, step: Step, tokens: list[list[int]]) -> dict[str, Any]:
    """Milliseconds of the steps with these tokens, and which of the rank's experts they chose."""
    held = rank.loaded.placement.local(rank.parallel.rank)
    times = step_times(step, tokens, rank.device)
    hits, chosen = count_choices(step, tokens, held)
    return {
        "step_ms": statistics.median(times),
        "hits": hits,
        "held_share": chosen,
        "intervals_ms": [round(time, 4) for time in times],
    }
