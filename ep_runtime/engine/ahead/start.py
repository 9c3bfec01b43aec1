"""The engine's end: starts the compiling process before weights are read, and takes its kernels when they have been."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import torch

from ep_runtime.engine.ahead.job import Job, Variant
from ep_runtime.engine.ahead.kept import cached, keep, kept, list_path
from ep_runtime.engine.graphs import buckets_up_to
from model.decoder import Decoder

if TYPE_CHECKING:
    from ep_runtime.config import RuntimeConfig
    from model.loader import PreparedModel
    from model.memory import MemoryPlan, Needs

log = logging.getLogger(__name__)

MODULE = "ep_runtime.engine.ahead.main"
MOST_PROCESSES = 8
"""A list has tens of kernels."""
PROCESS_BYTES = 2**29
"""What one process may take of the host's memory while it compiles."""

PATIENCE_S = 120.0
"""For kernels, once the weights are there. What has not come by then is compiled when it is needed."""


def processes_for(cores: int, available: int, local_ranks: int) -> int:
    """A rank's processes beside its own one, of a host whose ranks all compile, and which has so many bytes of memory available."""
    return max(1, min(MOST_PROCESSES, cores // local_ranks - 1, available // local_ranks // PROCESS_BYTES))


def job_for(
    config: RuntimeConfig, prepared: PreparedModel, needs: Needs, plan: MemoryPlan, layout: str, local_ranks: int
) -> Job | None:
    """What to compile while weights are read; None where that is off, or no kernels of `model.layers.fused` run."""
    device, parallel, processes = prepared.device, prepared.parallel, config.compile_processes
    if processes == 0 or device.type != "cuda" or config.forward_mode == "reference" or not isinstance(prepared.module, Decoder):
        return None
    if processes is None:
        processes = processes_for(len(os.sched_getaffinity(0)), psutil.virtual_memory().available, local_ranks)
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
        processes=processes,
        local_rank=parallel.rank % local_ranks,
        local_ranks=local_ranks,
    )


class Compiler:
    """A process that compiles; `module` is what it runs. It and its workers end when its standard input is closed here.

    Raises OSError where none can be started.
    """

    def __init__(self, job: Job, module: str = MODULE) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # what this process imports, that one does
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdin is not None
        # Taken from the process, whose `communicate` would close it.
        self._lifeline, self._process.stdin = self._process.stdin, None
        with suppress(BrokenPipeError):  # it has ended already: `compiled` says so
            self._lifeline.write(msgspec.json.encode(job) + b"\n")

    def compiled(self, patience_s: float = PATIENCE_S) -> list[Variant]:
        """What it has compiled, when it is done; nothing, with a warning, if it failed or takes too long."""
        try:
            answer, _ = self._process.communicate(timeout=patience_s)
            if self._process.returncode == 0:
                return [msgspec.json.decode(line, type=Variant) for line in answer.splitlines()]
            log.warning("kernels could not be compiled ahead (status %d): they are when first needed", self._process.returncode)
        except subprocess.TimeoutExpired:
            log.warning("kernels are not compiled within %g s: some will be when they are first needed", patience_s)
        except msgspec.DecodeError as error:
            log.warning("kernels that were compiled ahead are not known (%s): they are loaded when first needed", error)
        return []

    def close(self) -> None:
        """End it and its workers, if they run, and collect it; what they leave in its pipes is not waited for."""
        self._process.kill()
        self._lifeline.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait()


@contextmanager
def compiling(job: Job | None) -> Iterator[Callable[[], int]]:
    """Kernels are compiled in another process meanwhile, or were by an earlier start; the answer loads them and says how many."""
    known, compiler = [], None
    if job is not None:
        import triton

        try:
            path = list_path(job, Path(triton.knobs.cache.dir))
            known = kept(path) or []
            if not known or not all(map(cached, known)):
                compiler = Compiler(job)
        except OSError as error:
            log.warning("kernels are not compiled ahead, but when first needed: %s", error)
            known = []
    if compiler is None:
        yield lambda: load_kernels(known)
        return

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
    """Load kernels from Triton's cache onto the device, ready for their first launch; how many could be. Others are warnings."""
    loaded = 0
    for variant in variants:
        try:
            compiled = getattr(import_module(variant.module), variant.name).preload(variant.data)
            loaded += compiled.run is not None  # asking for it loads the kernel
        except Exception as error:
            log.warning("%s is not loaded ahead: %r", variant.name, error)
    return loaded
