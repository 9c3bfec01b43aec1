"""An `LLM` that is measured: it notes when results arrive, and knows its rank's bytes."""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ep_runtime.bench import bandwidth, report
from ep_runtime.bench.configs import CONFIGS, write_config
from ep_runtime.bench.floor import StepBytes, step_bytes, weight_bytes
from ep_runtime.bench.load_floor import FloorModel
from ep_runtime.bench.steps import Arrival
from ep_runtime.bench.vision_encoder import matrix_peak
from ep_runtime.config import ATTENTION_LAYOUTS
from ep_runtime.engine.main import collect_garbage, pick_device
from ep_runtime.offline.llm import LLM
from ep_runtime.offline.samples import SamplingParams
from ep_runtime.scheduler.core import Plan, SchedulerLimits
from ep_runtime.scheduler.scheduler import Scheduler
from ep_runtime.supervise.place import read_place
from model.reads import WeightBytes
from protocol.messages import Abort, Results, Submit


class WatchedScheduler(Scheduler):
    """Keeps the plans of the steps that were launched."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        self.plans: list[Plan] = []

    def launched(self, plan: Plan) -> None:
        """Note it, if it has rows."""
        super().launched(plan)
        if plan.spans:
            self.plans.append(plan)


class MeasuredLLM(LLM):
    """Notes each step's arrival on the host. Answers are token ids alone: detokenization is no part of what is measured.

    `generate` runs whole loads; `submit` hands over one request while `head.turn` is called by hand. `on_results` sees all results.
    """

    scheduler_type = WatchedScheduler

    def __init__(self, model: str, **settings: Any) -> None:
        self.arrivals: list[Arrival] = []
        self.on_arrival: Callable[[Arrival], None] = self.arrivals.append
        self.on_results: Callable[[Results], None] | None = None
        started = time.perf_counter()
        super().__init__(model, **settings)
        self.ready_seconds = time.perf_counter() - started
        assert isinstance(self._scheduler, WatchedScheduler)
        self.watched: WatchedScheduler = self._scheduler
        self.tokenizer = None
        self.dtype = str(self._rank.dtype).removeprefix("torch.")
        self.device = self._rank.device
        self.parallel = self._rank.parallel
        self.layout = self._rank.layout
        self.load_report = self._rank.loaded.report
        self.compile_seconds = self._rank.compile_seconds
        self.vocab_size = self._rank.spec.vocab_size
        self.encoded = self._rank.images
        loaded = self._rank.loaded
        self.model, self.placement, self.communicator = loaded.model, loaded.placement, self._epoch.executor.comm
        # A decode step reads nothing of the tower.
        tower = sum(weight.nbytes for weight in loaded.tower.parameters()) if loaded.tower is not None else 0
        self.weights: WeightBytes = weight_bytes(
            loaded.config, self.parallel, loaded.placement, self.load_report.nbytes - tower, self.dtype
        )

    def submit(self, message: Submit | Abort) -> None:
        """Hand a request to the head, or take some back; the next turn of the head receives it."""
        self._port.send(message)

    def step_bytes(self, batch: int, context: int, *, owners: int | None = None) -> StepBytes:
        """What the busier rank moves in one decode step; or would, if so many `owners` divided the sequences."""
        owners = owners or self._rank.owners
        placement = self._rank.loaded.placement
        return step_bytes(self.weights, self._rank.spec, placement, self.dtype, batch=batch, context=context, owners=owners)

    def floor_model(self, bandwidth: float) -> FloorModel:
        """What any step costs at least: at `bandwidth` bytes per second, and at what a large product reaches here, now measured."""
        loaded = self._rank.loaded
        peak = matrix_peak(self.device, self._rank.dtype)
        spec, owners = self._rank.spec, self._rank.owners
        return FloorModel(self.weights, spec, loaded.placement, self.dtype, bandwidth=bandwidth, peak=peak, owners=owners)

    def memory_bytes(self) -> int:
        """Most memory that this rank has held: the device's, as torch counts it, or the process's on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _take(self, results: Results) -> None:
        super()._take(results)
        if self.on_results is not None:
            self.on_results(results)
        sequences = sum(1 for update in results.updates if update.tokens)
        if sequences:
            self.on_arrival(Arrival(time.perf_counter(), sequences, results.stats.host_seconds))


@dataclass(frozen=True, slots=True)
class Session:
    """A loaded model on rank 0, and the bandwidth that was measured before it was loaded, in bytes per second."""

    llm: MeasuredLLM
    bandwidth: float

    def describe(self) -> dict[str, Any]:
        """What every result says of the model and where it ran."""
        llm = self.llm
        device = torch.cuda.get_device_name(llm.device) if llm.device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
        return {
            "model": llm.config.served_model_name,
            "ranks": llm.parallel.world,
            "dtype": llm.dtype,
            "device": device,
            "forward_mode": llm.config.forward_mode,
            "attention_layout": llm.layout,
            "rows_stay": llm.layout == "data" and llm.communicator.peers is not None,
            "max_num_batched_tokens": llm.config.max_num_batched_tokens,
            "weight_bytes_rank0": llm.load_report.nbytes,
            "load_seconds": round(llm.load_report.seconds, 2),
            "ready_seconds": round(llm.ready_seconds, 2),
            "bandwidth_gb_s": round(self.bandwidth / 1e9, 1),
        }


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say what is loaded and how; they mean what the server's mean."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="model folder, or a config.json for dummy weights")
    source.add_argument("--config-name", choices=sorted(CONFIGS), help="a published configuration with dummy weights")
    parser.add_argument("--layers", type=int, help="shorten --config-name to this many layers")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say how a model runs."""
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--forward-mode", choices=["reference", "eager", "graph"])
    parser.add_argument("--attention-layout", choices=[*ATTENTION_LAYOUTS, "auto"], default="replicated")
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--threads", type=int, help="compute threads of each rank on the CPU")
    report.add_output_arguments(parser)


@contextmanager
def open_session(options: argparse.Namespace, *, sequences: int, length: int) -> Iterator[Session]:
    """Load what `options` name, for so many sequences of so many tokens each.

    Under torchrun every rank calls this; the other ranks serve rank 0 in here, and their processes end when it is done.
    """
    device = pick_device(options.device, read_place(os.environ).local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif options.threads is not None:
        torch.set_num_threads(options.threads)
    measured = bandwidth.measure(device)
    with model_folder(options) as (folder, name, load_format):
        settings = llm_settings(options, sequences=sequences, length=length)
        with MeasuredLLM(str(folder), served_model_name=name, load_format=load_format, **settings) as llm:
            collect_garbage()
            yield Session(llm, measured)


def llm_settings(options: argparse.Namespace, *, sequences: int, length: int) -> dict[str, Any]:
    """Fields of the configuration for so many sequences of so many tokens each, and as the flags say."""
    same = ("dtype", "device", "forward_mode", "attention_layout", "gpu_memory_utilization", "threads", "max_num_batched_tokens")
    bounds = {"max_model_len": length, "max_num_seqs": sequences, "max_queue": max(256, sequences)}
    return bounds | {field: getattr(options, field) for field in same}


@contextmanager
def model_folder(options: argparse.Namespace) -> Iterator[tuple[Path, str, str]]:
    """(folder, name, load format). A configuration without weights is put into a folder of its own, with dummy weights."""
    model = Path(options.model) if options.model else None
    if model is not None and model.is_dir():
        yield model, model.name, options.load_format
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(temporary)
        if model is None:
            write_config(options.config_name, folder, options.layers)
            name = options.config_name + (f", {options.layers} layers" if options.layers else "")
        else:
            (folder / "config.json").write_bytes(model.read_bytes())
            name = model.stem
        yield folder, name, "dummy"


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Token ids drawn evenly from the vocabulary."""
    return np.random.default_rng(seed).integers(0, vocab_size, (count, length)).tolist()


def greedy(tokens: int) -> SamplingParams:
    """Exactly so many tokens, the likeliest each time."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, seed=0)


def numbers(text: str) -> list[int]:
    """An argument such as "1,8,32"."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a number below 1")
    return values


def check_complete(outputs: Sequence[Any], tokens: int) -> None:
    """Raise RuntimeError unless every output has all its tokens: a benchmark must not time failures."""
    for output in outputs:
        for completion in output.outputs:
            if completion.error is not None or len(completion.token_ids) != tokens:
                raise RuntimeError(f"a request gave {len(completion.token_ids)} of {tokens} tokens: {completion.error}")
