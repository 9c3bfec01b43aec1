"""`prefill`: tokens per second of prompts, beside the floor, and beside transformers with --peer."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from ep_runtime.bench import peer, plots, report
from ep_runtime.bench.load import profile_load, run_load
from ep_runtime.bench.load_floor import FloorModel
from ep_runtime.bench.session import Session, add_model_arguments, numbers, open_session, random_prompts

COLUMNS = {
    "prompts": "prompts",
    "prompt_len": "tokens each",
    "seconds": "seconds",
    "tokens_per_s": "tokens/s",
    "floor_seconds": "floor s",
    "floor_share": "floor/ours",
    "steps": "steps",
    "host_ms": "host ms/step",
    "gigabytes": "GB",
    "teraflops": "TFLOP",
}
ABOUT = ("model", "ranks", "dtype", "device", "forward_mode", "ready_seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    add_model_arguments(parser)
    parser.add_argument("--batch", type=numbers, default=[1, 8], metavar="N,N", help="prompts at once")
    parser.add_argument("--prompt-len", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=3, help="the median is shown")
    parser.add_argument("--profile", action="store_true", help="also show the kernels that the time goes to")
    peer.add_arguments(parser)


def run(options: argparse.Namespace) -> None:
    """From all prompts handed over to the first token of the last: tokens per second."""
    cells = [peer.Cell(batch=batch, prompt_len=options.prompt_len, new_tokens=1) for batch in options.batch]
    theirs = peer.measure(options, cells, options.repeat)
    with open_session(options, sequences=max(options.batch), length=options.prompt_len + 2) as session:
        floor = session.llm.floor_model(session.bandwidth)
        rows = [measure(session, batch, options.prompt_len, options.repeat, floor) for batch in options.batch]
        profiles = [profile(session, batch, options.prompt_len, options.repeat) for batch in options.batch if options.profile]
        about = {**report.environment(), **session.describe(), "memory_bytes": session.llm.memory_bytes()}
    for row, other in zip(rows, theirs, strict=bool(theirs)):
        row |= peer.columns(other, row["seconds"], other.get("seconds"), "peer_seconds")
    print(", ".join(f"{name} {about[name]}" for name in ABOUT))
    print(report.table(rows, COLUMNS | (peer.COLUMNS | {"peer_seconds": "transformers s"} if theirs else {})))
    print("\n".join(peer.notes(theirs)), end="\n" if theirs else "")
    for kernels in profiles:
        print(f"\n{kernels['title']}\n{kernels['table']}")
    result = {"benchmark": "prefill", **about, "rows": rows, "peer": theirs, "profiles": profiles}
    report.write(options.out, result)
    plots.save(options.plot, result)


def measure(session: Session, batch: int, prompt_len: int, repeat: int, floor: FloorModel) -> dict[str, Any]:
    """The median of `repeat` runs, after one that is not counted; every run has prompts of its own."""
    vocab_size = session.llm.vocab_size
    runs = [
        run_load(session.llm, random_prompts(batch, prompt_len, vocab_size, seed=number), 1, floor) for number in range(repeat + 1)
    ]
    middle = sorted(runs[1:], key=lambda one: one.seconds)[(repeat - 1) // 2]
    median = statistics.median(one.seconds for one in runs[1:])
    print(f"{batch} prompts: {batch * prompt_len / median:.0f} tokens/s", flush=True)
    return {
        "prompts": batch,
        "prompt_len": prompt_len,
        **middle.figures(),
        "seconds": median,
        "floor_share": middle.floor.seconds / median,
        "tokens_per_s": batch * prompt_len / median,
        "all": [one.seconds for one in runs],
    }


def profile(session: Session, batch: int, prompt_len: int, repeat: int) -> dict[str, Any]:
    """Where the time of one more run goes."""
    prompts = random_prompts(batch, prompt_len, session.llm.vocab_size, seed=repeat + 1)
    found = profile_load(session.llm, prompts, 1)
    return found | {"title": f"{batch} prompts: {found['title']}"}
