"""One part of `bench scale`: a model, a layout, a number of ranks, loaded once. `-m ep_runtime.bench.scale_part`, under torchrun.

Rank 0 writes the part's result as JSON to --out: figures, or under "skipped" why the model does not fit.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from typing import Any

import psutil
import torch

from ep_runtime.bench import decode, report
from ep_runtime.bench.scale_shares import collective_share, measure_imbalance
from ep_runtime.bench.session import (
    Session,
    add_model_arguments,
    check_complete,
    greedy,
    model_folder,
    numbers,
    open_session,
    random_prompts,
)
from ep_runtime.engine.main import pick_device
from ep_runtime.supervise.place import Place, read_place
from model.loader import prepare_model
from model.parallel import Parallel

KEPT = ("batch", "step_ms", "p90_ms", "tokens_per_s", "floor_ms", "ratio", "split_floor_ms", "host_ms", "bytes", "intervals_ms")
"""Of a row of `bench decode`."""


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The flags that say what is measured, which `bench scale` hands on."""
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32, 128, 256], metavar="N,N", help="sequences of decode steps")
    parser.add_argument("--prompt-len", type=int, default=128, help="of decode")
    parser.add_argument("--new-tokens", type=int, default=64, help="of decode")
    parser.add_argument("--prefill", type=numbers, default=[1, 8], metavar="N,N", help="prompts at once")
    parser.add_argument("--prefill-len", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=256, help="of the throughput, all at once")
    parser.add_argument("--request-len", type=int, default=1024)
    parser.add_argument("--request-tokens", type=int, default=256)


def main(argv: list[str] | None = None) -> None:
    """Measure everything of one part."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.bench.scale_part", description=__doc__)
    add_model_arguments(parser)
    add_sizes(parser)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    place = read_place(os.environ)
    reason = does_not_fit(options, place)
    if reason is None:
        measure(options)
    elif place.rank == 0:
        report.write(options.out, {"skipped": reason})


def does_not_fit(options: argparse.Namespace, place: Place) -> str | None:
    """Why the weights of a rank do not fit its GPU, the same on every rank; None when they do, or there is no GPU."""
    device = pick_device(options.device, place.local_rank)
    if device.type != "cuda":
        return None
    room = torch.cuda.get_device_properties(device).total_memory * options.gpu_memory_utilization
    dtype = torch.bfloat16 if options.dtype == "auto" else getattr(torch, options.dtype)
    with model_folder(options) as (folder, *_):
        # The first ranks have the most experts. No weight is read, so their files need not be there.
        prepared = prepare_model(folder, Parallel(0, place.world), dtype=dtype, device="cpu", load_format="dummy")
    if prepared.weight_bytes <= room:
        return None
    return f"weights of {prepared.weight_bytes / 2**30:.0f} GiB a rank do not fit {room / 2**30:.0f} GiB"


def measure(options: argparse.Namespace) -> None:
    """Load, and time what the flags ask for."""
    spans = (
        options.prompt_len + max(options.new_tokens, 40),
        options.prefill_len + 2,
        options.request_len + options.request_tokens,
    )
    sequences = max(*options.batch, *options.prefill, min(options.requests, 256))
    with open_session(options, sequences=sequences, length=max(spans)) as session:
        started = time.time() - psutil.Process().create_time()
        about = session.describe()
        result = {
            **report.environment(),
            **about,
            "start_seconds": round(started, 2),
            "decode": [decode_row(session, batch, options) for batch in options.batch],
            "imbalance": measure_imbalance(session.llm, options.batch, options.prompt_len),
            "prefill": [prefill_row(session, prompts, options.prefill_len) for prompts in options.prefill],
            "throughput": throughput_row(session, options),
            "memory_bytes": session.llm.memory_bytes(),
        }
        report.write(options.out, result)


def decode_row(session: Session, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """A row of `bench decode`, and the share of collectives."""
    prompts = random_prompts(batch, options.prompt_len, session.llm.vocab_size)
    measured = decode.measure(session, prompts, options.new_tokens)
    row = {key: measured[key] for key in KEPT}
    row["collectives_share"] = collective_share(session, batch, options.prompt_len, options.new_tokens)
    return row


def prefill_row(session: Session, prompts: int, prompt_len: int) -> dict[str, Any]:
    """Seconds to the first token of the last prompt; the second of two runs, with prompts of their own."""
    seconds = [timed(session, random_prompts(prompts, prompt_len, session.llm.vocab_size, seed=run), 1) for run in range(2)]
    return {
        "prompts": prompts,
        "prompt_len": prompt_len,
        "seconds": seconds[-1],
        "tokens_per_s": prompts * prompt_len / seconds[-1],
    }


def throughput_row(session: Session, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of all requests at once."""
    tokens = options.request_tokens
    seconds = timed(session, random_prompts(options.requests, options.request_len, session.llm.vocab_size), tokens)
    return {
        "requests": options.requests,
        "prompt_len": options.request_len,
        "new_tokens": tokens,
        "seconds": seconds,
        "new_tokens_per_s": options.requests * tokens / seconds,
    }


def timed(session: Session, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds from all prompts handed over to the last token of all."""
    began = time.perf_counter()
    outputs = session.llm.generate(prompts, greedy(new_tokens))
    seconds = time.perf_counter() - began
    check_complete(outputs, new_tokens)
    return seconds


if __name__ == "__main__":
    main()
