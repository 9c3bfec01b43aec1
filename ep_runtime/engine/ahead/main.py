"""Compiles a rank's kernels into Triton's cache, on a machine's idle cores: `python -P -m ep_runtime.engine.ahead.main`.

It reads a `Job` from its standard input, a line of JSON, touches no device, and answers with the `Variant`s that it has compiled.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import msgspec
import torch

from ep_runtime.engine.ahead.dry import variants
from ep_runtime.engine.ahead.job import Job, Variant

log = logging.getLogger(__name__)


def in_turn(found: Sequence[Variant], part: int, parts: int) -> list[Variant]:
    """All of them, from the beginning of one of `parts` equal parts on, and round."""
    start = len(found) * part // parts
    return [*found[start:], *found[:start]]


def compile_variant(variant: Variant, finish: Callable[[Any], object]) -> str:
    """Compile one into the cache, or find it there; `finish` takes it. Says what failed."""
    try:
        finish(getattr(import_module(variant.module), variant.name).preload(variant.data))
    except Exception as error:
        return f"{variant.name}: {error!r}"
    return ""


def compile_all(found: Sequence[Variant], processes: int, finish: Callable[[Any], object]) -> list[Variant]:
    """Compile in so many processes, which are copies of this one; those that were compiled."""
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        faults = pool.map(partial(compile_variant, finish=finish), found, chunksize=1)
    for fault in filter(None, faults):
        log.warning("not compiled ahead: %s", fault)
    return [variant for variant, fault in zip(found, faults, strict=True) if not fault]


def build_launcher(compiled: Any) -> None:
    """The host's part of a kernel, which Triton compiles, too, and otherwise at its first launch."""
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(compiled.src, compiled.metadata)


def main() -> None:
    """Read, compile, answer."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s compiler %(levelname)s %(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    began = time.monotonic()
    found = in_turn(variants(job), job.local_rank, job.local_ranks)
    listed = time.monotonic()
    compiled = compile_all(found, job.processes, build_launcher)
    log.info(
        "%d kernels of rank %d: listed in %.1f s, compiled in %.1f s by %d processes",
        len(compiled),
        job.rank,
        listed - began,
        time.monotonic() - listed,
        job.processes,
    )
    sys.stdout.buffer.write(b"".join(msgspec.json.encode(variant) + b"\n" for variant in compiled))


if __name__ == "__main__":
    main()
