"""Compiles a rank's kernels into Triton's cache, on a machine's idle cores: `python -P -m ep_runtime.engine.ahead.main`.

It reads a `Job` from its standard input, a line of JSON, touches no device, and answers with the `Variant`s that it has compiled.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from ep_runtime.engine.ahead.dry import variants
from ep_runtime.engine.ahead.job import Job, Variant
from ep_runtime.engine.ahead.kept import kept, list_path
from ep_runtime.engine.ahead.noting import TargetDriver
from ep_runtime.engine.ahead.pool import begin, compile_all, reply

log = logging.getLogger(__name__)


def in_turn(found: Sequence[Variant], part: int, parts: int) -> list[Variant]:
    """All of them, from the beginning of one of `parts` equal parts on, and round."""
    start = len(found) * part // parts
    return [*found[start:], *found[:start]]


def listed(job: Job, cache: Path) -> list[Variant]:
    """The job's kernels: those of the list in the cache's folder, else those that steps without a device launch."""
    return kept(list_path(job, cache)) or variants(job)


def build_launcher(compiled: Any) -> None:
    """The host's part of a kernel, which Triton compiles, too, and otherwise at its first launch."""
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(compiled.src, compiled.metadata)


def main() -> None:
    """Read, compile, answer."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s compiler %(levelname)s %(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    job, answer = begin()
    began = time.monotonic()
    triton.runtime.driver.set_active(TargetDriver(job.capability))
    found = in_turn(listed(job, Path(triton.knobs.cache.dir)), job.local_rank, job.local_ranks)
    ready = time.monotonic()
    compiled = compile_all(found, job.processes, build_launcher, answer)
    log.info(
        "%d kernels of rank %d: listed in %.1f s, compiled in %.1f s by %d processes",
        len(compiled),
        job.rank,
        ready - began,
        time.monotonic() - ready,
        job.processes,
    )
    reply(answer, compiled)


if __name__ == "__main__":
    main()
