"""What ranks launch that serve waves of requests, and `variants` does not list; prints it as JSON.

The engine's own head, scheduler and executor serve, on tensors that have a shape and no memory: kernels are noted, tokens are
zeros, and a graph's replay launches nothing. A program of its own, since the suite's processes have chosen Triton's interpreter.
What is launched and what is listed are noted in processes of their own, too, since a kernel remembers who notes it.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ep_runtime.bench.configs import write_config
from ep_runtime.engine.ahead.dry import META, dry_ranks, variants
from ep_runtime.engine.ahead.job import Job, Variant
from ep_runtime.engine.ahead.noting import noting
from ep_runtime.engine.executor import Executor
from ep_runtime.engine.graphs import FIELDS, CapturedStep, FixedRows, buckets_up_to
from ep_runtime.engine.head import Head
from ep_runtime.engine.port import LocalPort
from ep_runtime.engine.rank import DTYPES
from ep_runtime.engine.run_command import run_command
from ep_runtime.engine.sampler import Sampler
from ep_runtime.engine.sampling import logprobs
from ep_runtime.engine.setup import scheduler_limits
from ep_runtime.engine.step_sampling import count_wanted
from ep_runtime.scheduler.scheduler import Scheduler
from kernels import checksum_triton
from kernels.tuning import Tuning, load_table
from model import scratch
from model.batch import ForwardOutput
from model.layers.fused import FusedOperators
from model.loader import AttentionLayout, PreparedModel, prepare_model
from model.parallel import Parallel
from model.state import checksum
from model.state.registry import StateRegistry
from protocol.commands import Body, Forward, Shutdown
from protocol.frame import compose
from protocol.messages import Results, SamplingParams, Submit
from protocol.progress import ProgressPage
from protocol.slots import SlotLimits, SlotTable
from tests.support.waves import SIZES, TURNS, waves_of

MODELS = {"qwen3-30b-a3b": 2, "qwen3-next-80b-a3b": 4}
"""With so many layers: one of each kind, and a second of experts."""
LAYOUTS = ("tensor", "data")
WORLD = 2
DIGEST_INTERVAL = 3


class NoDevice(TorchFunctionMode):
    """Memory of the host is not pinned, and what comes to it from a tensor without memory is zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.pop("pin_memory", False):
            return torch.zeros(*args, **kwargs)
        if func is torch.Tensor.pin_memory or (func is torch.Tensor.copy_ and args[1].is_meta and not args[0].is_meta):
            return args[0]
        return func(*args, **kwargs)


class OneRank:
    """In the place of the head's broadcaster: runs commands on one rank alone, and keeps what it launches."""

    def __init__(self, job: Job, prepared: PreparedModel, limits: SlotLimits, noted: dict[Variant, None]) -> None:
        self.step = 0
        self.last_steps = [0] * job.world
        self.slots = SlotTable(limits)
        self.launched: dict[Variant, None] = {}
        self._noted = noted
        self._rank, self._vocab_size = job.rank, prepared.spec.vocab_size
        dtype = DTYPES[job.dtype]
        blocks = {"num_blocks": limits.num_blocks, "block_size": limits.block_size}
        state = StateRegistry(prepared.spec, max_slots=limits.slots_of_owner, dtype=dtype, device=META, **blocks)
        self._executor = Executor(prepared.module, state, dry_ranks(job), limits, META, dtype=dtype, graphs=True)
        graphs = self._executor._graphs
        assert graphs is not None
        for rows in job.buckets:
            inputs, fixed = torch.empty(len(FIELDS), rows, dtype=torch.int64, device=META), FixedRows.of(rows, 1, META)
            graph: Any = SimpleNamespace(replay=lambda: None)
            output = graphs.forward(inputs, fixed._replace(block_tables=fixed.block_tables.new_empty(rows, graphs._tables.width)))
            graphs._steps.append(CapturedStep(rows=rows, inputs=inputs, fixed=fixed, graph=graph, output=output, collectives=0))

    def run(self, command: Body, seq_id: int, *, tokens: Sequence[int] = (), choose: Any = None, flags: int = 0, **_: Any) -> None:
        """As the rank does. On others than rank 0 the head's sampler is given logits, too: it owes the scheduler tokens."""
        if isinstance(command, Shutdown):
            return
        _, frame = compose(command, seq_id, np.array(tokens, np.int32), step=self.step, flags=flags)
        self.step += 1
        choose_here = choose if self._rank == 0 else room_for_tokens
        _, error = run_command(self._executor, frame, self.slots, choose_here, lambda ballot: True, ProgressPage())
        if error is not None:
            raise error
        self.launched.update(self._noted)
        if isinstance(command, Forward) and self._rank != 0:
            wanted = sum(map(count_wanted, command.spans))
            choose(ForwardOutput(logits=torch.empty(wanted, self._vocab_size, device=META)), command)
        self._noted.clear()

    def settle(self) -> None:
        """Its commands are done."""


def room_for_tokens(output: ForwardOutput, command: Forward) -> torch.Tensor:
    """What a worker's forward takes the head's tokens with."""
    return torch.empty(sum(span.sampled for span in command.spans), dtype=torch.int64, device=META)


def serve(job: Job, noted: dict[Variant, None]) -> list[Variant]:
    """What the rank of `job` launches while it serves the waves."""
    layout = cast("AttentionLayout", job.layout)
    operators = FusedOperators(META, Tuning(load_table(job.device), lambda _: None))
    place = {"dtype": DTYPES[job.dtype], "device": META, "load_format": "dummy"}
    prepared = prepare_model(Path(job.folder), Parallel(job.rank, job.world), operators=operators, attention_layout=layout, **place)
    owners = job.world if job.layout == "data" else 1
    limits = SlotLimits(
        max_slots=job.max_slots,
        num_blocks=-(-job.max_slots // owners) * -(-job.max_model_len // job.block_size),
        block_size=job.block_size,
        max_length=job.max_model_len,
        max_rows=job.max_rows,
        world=job.world,
        recurrent=not prepared.spec.rewindable,
        owners=owners,
    )
    config = SimpleNamespace(max_queue=100, enable_prefix_caching=True)
    bounds = scheduler_limits(cast("Any", SimpleNamespace(config=config, spec=prepared.spec, max_image_tokens=0)), limits)
    rank = OneRank(job, prepared, limits, noted)
    finished: set[str] = set()

    def take(results: Results) -> None:
        assert all(update.error is None for update in results.updates)
        finished.update(update.request_id for update in results.updates if update.finish is not None)

    port = LocalPort(take)
    for lookahead in (False, True):
        head = Head(
            broadcaster=cast("Any", rank),
            scheduler=Scheduler(bounds),
            sampler=Sampler(prepared.spec.vocab_size, job.max_slots, META, bounds.eos_token_ids, fused=True),
            port=port,
            epoch=0,
            digest_interval=DIGEST_INTERVAL,
            read_when_ready=not lookahead,
        )
        finished.clear()
        sent = submit_waves(head, port)
        while not head.idle:
            head.turn(idle_wait_s=0.0)
        assert finished == sent
        head.shutdown()
    return list(rank.launched)


def submit_waves(head: Head, port: LocalPort) -> set[str]:
    """Send all requests, some turns between the waves; their names."""
    names = set()
    for wave, requests in enumerate(waves_of(lambda length, seed: [3 + seed % 100] * length)):
        for place, request in enumerate(requests):
            name = f"{wave}-{place}"
            params = {"seed": 0, "temperature": 0.0, "ignore_eos": True, **request}
            ids = params.pop("prompt")
            port.send(Submit(name, name, ids, msgspec.convert(params, SamplingParams)))
            names.add(name)
        for _ in range(TURNS):
            head.turn(idle_wait_s=0.0)
    return names


def launched(job: Job) -> list[Variant]:
    """What serving launches, as far as kernels of Triton go."""
    scratch.SAMPLED_AT_ONCE["meta"] = logprobs._ELEMENTS_AT_ONCE["meta"] = scratch.SAMPLED_AT_ONCE["cuda"]
    checksum._row_sums = checksum_triton.row_sums
    with noting(job.capability) as noted, NoDevice():
        return serve(job, noted)


def alone(task: tuple[Callable[[Job], list[Variant]], Job]) -> list[Variant]:
    """One task of a process."""
    return task[0](task[1])


def main() -> None:
    """Every model, layout and rank."""
    with tempfile.TemporaryDirectory() as root:
        jobs = []
        for name, layers in MODELS.items():
            (Path(root) / name).mkdir()
            write_config(name, Path(root) / name, layers)
            for layout in LAYOUTS:
                for rank in range(WORLD):
                    jobs.append(job_of(f"{root}/{name}", layout, rank))
        with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
            results = pool.map(alone, [(ask, job) for job in jobs for ask in (launched, variants)], chunksize=1)
    found = []
    for job, seen, known in zip(jobs, results[::2], results[1::2], strict=True):
        names = sorted({variant.name for variant in seen})
        new = [variant.name for variant in seen if variant not in set(known)]
        found.append({"model": Path(job.folder).name, "layout": job.layout, "rank": job.rank, "names": names, "new": new})
    json.dump(found, sys.stdout)


def job_of(folder: str, layout: str, rank: int) -> Job:
    """As the engine asks for it."""
    return Job(
        folder=folder,
        rank=rank,
        world=WORLD,
        dtype="bfloat16",
        layout=layout,
        device="NVIDIA H200",
        capability=90,
        block_size=16,
        max_slots=SIZES["max_num_seqs"],
        max_rows=SIZES["max_num_batched_tokens"],
        max_model_len=SIZES["max_model_len"],
        buckets=buckets_up_to(SIZES["max_num_seqs"]),
        peers=True,
        processes=1,
        local_rank=rank,
        local_ranks=WORLD,
    )


if __name__ == "__main__":
    main()
