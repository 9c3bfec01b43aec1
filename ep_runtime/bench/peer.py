"""transformers as a second peer of `decode` and `prefill`: the same shapes on the same device in the same run.

It is a process of its own, which has ended before our model is loaded: each has the device to itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ep_runtime.bench.demo import run_child
from ep_runtime.bench.session import model_folder
from ep_runtime.supervise.place import read_place

COLUMNS = {"peer_ratio": "theirs/ours", "peer_way": "its way"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One shape: so many prompts of so many tokens, and new tokens of each; one new token is the prompt's alone."""

    batch: int
    prompt_len: int
    new_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flag of a benchmark that has this peer."""
    parser.add_argument(
        "--peer", type=_peer, metavar="transformers", help="also measure transformers on one device, for the shapes that it can run"
    )


def measure(
    options: argparse.Namespace, cells: Sequence[Cell], repeat: int, given: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """One entry a cell, none without --peer: what `transformers_peer` writes. `given` is a prompt to use instead of random ones.

    Raises SystemExit under torchrun with several ranks, `BenchFailed` when its process fails.
    """
    if options.peer is None:
        return []
    if read_place(os.environ).world > 1:
        raise SystemExit("--peer transformers runs on one device: start it without torchrun")
    with model_folder(options) as (folder, _, load_format), tempfile.TemporaryDirectory(prefix="bench-peer-") as temporary:
        job, out = Path(temporary) / "job.json", Path(temporary) / "out.json"
        work = {
            "model": str(folder),
            "load_format": load_format,
            "dtype": options.dtype,
            "device": options.device,
            "cells": [asdict(cell) for cell in cells],
            "repeat": repeat,
            "given": None if given is None else list(given),
        }
        job.write_text(json.dumps(work), encoding="utf-8")
        run_child(["ep_runtime.bench.transformers_peer", str(job), str(out)], threads=options.threads or torch.get_num_threads())
        found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def columns(other: Mapping[str, Any], ours: float, theirs: float | None, name: str) -> dict[str, Any]:
    """What a row says of the peer's time `theirs`, None where it could not run, under the key `name`."""
    ratio = None if theirs is None else theirs / ours
    return {name: theirs, "peer_ratio": ratio, "peer_way": other.get("way")}


def notes(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for every shape that it could not run."""
    return [
        f"transformers cannot run {one['batch']} x {one['prompt_len']} here: {one['error']}" for one in found if one.get("error")
    ]


def _peer(text: str) -> str:
    if text != "transformers":
        raise argparse.ArgumentTypeError(f"{text!r} is no peer; transformers is")
    if importlib.util.find_spec("transformers") is None:
        raise argparse.ArgumentTypeError("transformers is not installed (extra 'dev')")
    return text
