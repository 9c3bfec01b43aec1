"""The engine's end: starts the compiling process before weights are read, and takes its kernels when they have been."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from ep_runtime.engine.ahead.job import Job, Variant
from ep_runtime.engine.ahead.kept import keep, kept, list_path
from ep_runtime.engine.setup import buckets_up_to
from model.decoder import Decoder

if TYPE_CHECKING:
    from ep_runtime.config import RuntimeConfig
    from model.loader import PreparedModel
    from model.memory import MemoryPlan, Needs

log = logging.getLogger(__name__)

MOST_PROCESSES = 16
"""A list has tens of kernels; each process takes some 300 MB."""

PATIENCE_S = 120.0
"""For kernels, once the weights are there. What has not come by then is compiled when it is needed."""


def processes_for(cores: int, local_ranks: int) -> int:
    """A rank's processes beside its own one, of a host whose ranks all compile."""
    return max(1, min(MOST_PROCESSES, cores // local_ranks - 1))


def job_for(
    config: RuntimeConfig, prepared: PreparedModel, needs: Needs, plan: MemoryPlan, layout: str, local_ranks: int
) -> Job | None:
    """What to compile while weights are read; None where the model does not run on the kernels of `model.layers.fused`."""
    device, parallel = prepared.device, prepared.parallel
    if device.type != "cuda" or config.forward_mode == "reference" or not isinstance(prepared.module, Decoder):
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return Job(
        folder=config.model,
        rank=parallel.rank,
        world=parallel.world,
        dtype=needs.dtype,
        layout=layout,
        device=torch.cuda.get_device_name(device),
        capability=10 * major + minor,
        block_size=config.block_size,
        max_slots=plan.max_slots,
        max_rows=needs.max_num_batched_tokens,
        max_model_len=needs.max_model_len,
        buckets=buckets_up_to(plan.max_slots) if needs.graphs else [],
        peers=parallel.world > 1 and config.coordinator_host is None,
        processes=processes_for(len(os.sched_getaffinity(0)), local_ranks),
        local_rank=parallel.rank % local_ranks,
        local_ranks=local_ranks,
    )


class Compiler:
    """A process that compiles."""

    def __init__(self, job: Job) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # what this process imports, that one does
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ep_runtime.engine.ahead.main"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()

    def compiled(self, patience_s: float = PATIENCE_S) -> list[Variant]:
        """What it has compiled, when it is done; nothing, with a warning, if it failed or takes too long."""
        try:
            answer, _ = self._process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            log.warning("kernels are not compiled within %g s: some will be when they are first needed", patience_s)
            return []
        if self._process.returncode != 0:
            log.warning("kernels could not be compiled ahead (status %d): they are when first needed", self._process.returncode)
            return []
        return [msgspec.json.decode(line, type=Variant) for line in answer.splitlines()]

    def close(self) -> None:
        """End it, if it runs, and collect it."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def compiling(job: Job | None) -> Iterator[Callable[[], int]]:
    """Kernels are compiled in another process meanwhile, or were by an earlier start; the answer loads them and says how many."""
    if job is None:
        yield lambda: 0
        return
    import triton

    path = list_path(job, Path(triton.knobs.cache.dir))
    known = kept(path)
    if known is not None:
        yield lambda: load_kernels(known)
        return
    compiler = Compiler(job)

    def load() -> int:
        variants = compiler.compiled()
        if variants:
            keep(path, variants)
        return load_kernels(variants)

    try:
        yield load
    finally:
        compiler.close()


def load_kernels(variants: list[Variant]) -> int:
    """Load kernels from Triton's cache onto the device, ready for their first launch; how many could be."""
    from triton.runtime.errors import OutOfResources

    loaded = 0
    for variant in variants:
        compiled = getattr(import_module(variant.module), variant.name).preload(variant.data)
        try:
            loaded += compiled.run is not None  # asking for it loads the kernel
        except OutOfResources as error:
            log.warning("%s does not fit this device: %s", variant.name, error)
    return loaded
