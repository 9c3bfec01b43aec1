"""`decode`: milliseconds of a steady decode step by batch size, beside the floor that memory sets."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ep_runtime.bench import peer, plots, report
from ep_runtime.bench.floor import split
from ep_runtime.bench.profile import TOKENS_NEEDED, StepProfile
from ep_runtime.bench.session import (
    MeasuredLLM,
    Session,
    add_model_arguments,
    check_complete,
    greedy,
    numbers,
    open_session,
    random_prompts,
)
from ep_runtime.bench.steps import Arrival, steady_host_ms, steady_intervals, summarise
from ep_runtime.engine.intake import TAKEN_AT_ONCE

COLUMNS = {
    "batch": "batch",
    "step_ms": "ms/step",
    "mean_ms": "mean",
    "p90_ms": "p90",
    "longest_ms": "longest",
    "tokens_per_s": "tokens/s",
    "floor_ms": "floor ms",
    "ratio": "step/floor",
    "split_floor_ms": "split floor",
    "gigabytes": "GB/step",
    "host_ms": "host ms",
    "steps": "steps",
}
PEER_COLUMNS = {"peer_ms": "transformers ms", **peer.COLUMNS, "same_tokens": "same tokens"}
"""With random weights tokens differ: each side has its own."""
ABOUT = ("model", "ranks", "dtype", "device", "forward_mode", "load_seconds", "ready_seconds", "bandwidth_gb_s")
WARM_TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    add_model_arguments(parser)
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32, 128], metavar="N,N", help="sequences at once")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument(
        "--prompt-file", type=Path, help="JSON list of token ids, instead of random prompts; its first answer is kept"
    )
    parser.add_argument("--profile", action="store_true", help="also show the kernels that a step's time goes to")
    peer.add_arguments(parser)


def run(options: argparse.Namespace) -> None:
    """Measure, print the table and write the JSON."""
    given = json.loads(options.prompt_file.read_text(encoding="utf-8")) if options.prompt_file else None
    prompt_len = len(given) if given is not None else options.prompt_len
    length = prompt_len + options.new_tokens
    cells = [peer.Cell(batch=batch, prompt_len=prompt_len, new_tokens=options.new_tokens) for batch in options.batch]
    theirs = peer.measure(options, cells, 1, given)
    with open_session(options, sequences=max(options.batch), length=length) as session:
        rows = []
        for batch in options.batch:
            prompts = [given] * batch if given is not None else random_prompts(batch, prompt_len, session.llm.vocab_size)
            rows.append(measure(session, prompts, options.new_tokens))
            print(f"batch {batch}: {rows[-1]['step_ms']:.3f} ms a step", flush=True)
        profiles = [profile(session, batch, prompt_len) for batch in options.batch] if options.profile else []
        memory = session.llm.memory_bytes()
        result = {"benchmark": "decode", **report.environment(), **session.describe(), "memory_bytes": memory, "rows": rows}
    for row, other in zip(rows, theirs, strict=bool(theirs)):
        row |= peer.columns(other, row["step_ms"], other.get("step_ms"), "peer_ms")
        row["same_tokens"] = row["tokens"] == other.get("tokens")
    print(f"\n{', '.join(f'{name} {result[name]}' for name in ABOUT)}, memory {memory / 2**30:.1f} GiB")
    print(f"prompts of {prompt_len} tokens, {options.new_tokens} new; attention {result['attention_layout']}")
    print(report.table(rows, COLUMNS | (PEER_COLUMNS if theirs else {})))
    print("\n".join(peer.notes(theirs)), end="\n" if theirs else "")
    for kernels in profiles:
        print(f"\n{kernels['title']}\n{kernels['table']}")
    result |= {"peer": theirs, "profiles": profiles}
    report.write(options.out, result)
    plots.save(options.plot, result)


def measure(session: Session, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """One row: all prompts at once, greedy. Host time is the head's, outside its waits, where the device is not the processor."""
    llm, batch = session.llm, len(prompts)
    check_complete(llm.generate(prompts, greedy(min(WARM_TOKENS, new_tokens))), min(WARM_TOKENS, new_tokens))
    llm.arrivals.clear()
    outputs = llm.generate(prompts, greedy(new_tokens))
    check_complete(outputs, new_tokens)
    intervals = steady_intervals(llm.arrivals, batch)
    times = summarise(intervals)
    context = len(prompts[0]) + new_tokens // 2
    moved = llm.step_bytes(batch, context)
    floor = moved.milliseconds(session.bandwidth)
    divided = moved if llm.layout == "tensor" else split(llm.step_bytes(batch, context, owners=1), llm.parallel.world)
    return {
        "batch": batch,
        "step_ms": times.median,
        "mean_ms": times.mean,
        "p90_ms": times.p90,
        "longest_ms": times.longest,
        "steps": times.steps,
        "tokens_per_s": batch / times.median * 1e3,
        "floor_ms": floor,
        "ratio": times.median / floor,
        "split_floor_ms": divided.milliseconds(session.bandwidth),
        "gigabytes": moved.total / 1e9,
        "bytes": asdict(moved),
        "host_ms": steady_host_ms(llm.arrivals, batch) if llm.device.type != "cpu" else None,
        "tokens": outputs[0].outputs[0].token_ids,
        "intervals_ms": [round(interval, 4) for interval in intervals],
    }


def profile(session: Session, batch: int, prompt_len: int) -> dict[str, Any]:
    """Where the time of some steady steps goes."""
    llm = session.llm
    watch = StepProfile(llm.device.type, batch)
    keep = llm.on_arrival

    def note(arrival: Arrival) -> None:
        keep(arrival)
        watch.arrived(arrival)

    llm.on_arrival = note
    prompts = random_prompts(batch, prompt_len, llm.vocab_size)
    try:
        llm.generate(prompts, greedy(min(_profile_tokens(llm, batch, prompt_len), llm.max_model_len - prompt_len)))
    finally:
        llm.on_arrival = keep
    rows = watch.rows()
    title = f"batch {batch}: time of {watch.steps_seen} steps by kernel"
    return {"title": title, "rows": rows, "table": report.table(rows[:20], StepProfile.COLUMNS)}


def _profile_tokens(llm: MeasuredLLM, batch: int, prompt_len: int) -> int:
    """New tokens of each sequence: the first decode while the last are still prompts, and all of them must meet for a profile.

    A sequence more than that is time without a figure: up to 4000 steps of every batch in `bench scale`.
    """
    assert llm.config.max_num_batched_tokens is not None  # a config that is resolved has all
    rows = max(1, llm.config.max_num_batched_tokens - batch)  # of prompts, in a step beside all that decode
    prompt_steps = -(-batch * prompt_len // rows)
    return TOKENS_NEEDED + prompt_steps + -(-batch // TAKEN_AT_ONCE)
