"""`throughput`: seconds of many requests that come at once, offline and without detokenization, through scheduler and ranks."""

from __future__ import annotations

import argparse
from typing import Any

from ep_runtime.bench import plots, report
from ep_runtime.bench.load import profile_load, run_load
from ep_runtime.bench.session import Session, add_model_arguments, open_session, random_prompts

COLUMNS = {
    "requests": "requests",
    "prompt_len": "in",
    "new_tokens": "out",
    "seconds": "seconds",
    "new_tokens_per_s": "out tokens/s",
    "tokens_per_s": "all tokens/s",
    "floor_seconds": "floor s",
    "floor_share": "floor/ours",
    "steps": "steps",
    "step_ms": "ms/step",
    "host_ms": "host ms/step",
    "preemptions": "preempted",
}
ABOUT = ("model", "ranks", "dtype", "device", "forward_mode", "ready_seconds")
WARM_REQUESTS, WARM_TOKENS = 8, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    add_model_arguments(parser)
    parser.add_argument("--requests", type=int, default=256, help="all handed over at once (default: %(default)s)")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--profile", action="store_true", help="also show the kernels that the time of a second such load goes to")


def run(options: argparse.Namespace) -> None:
    """Seconds from the first request handed over to the last token of all."""
    length = options.prompt_len + options.new_tokens
    with open_session(options, sequences=options.max_num_seqs, length=length) as session:
        row = measure(session, options)
        profiles = [profile(session, options)] if options.profile else []
        about = {**report.environment(), **session.describe(), "memory_bytes": session.llm.memory_bytes()}
    print(", ".join(f"{name} {about[name]}" for name in ABOUT))
    print(report.table([row], COLUMNS))
    for kernels in profiles:
        print(f"\n{kernels['title']}\n{kernels['table']}")
    result = {"benchmark": "throughput", **about, "rows": [row], "profiles": profiles}
    report.write(options.out, result)
    plots.save(options.plot, result)


def measure(session: Session, options: argparse.Namespace) -> dict[str, Any]:
    """The one row, after a small load that is not counted."""
    llm = session.llm
    floor = llm.floor_model(session.bandwidth)
    few = random_prompts(min(WARM_REQUESTS, options.requests), options.prompt_len, llm.vocab_size, seed=1)
    run_load(llm, few, min(WARM_TOKENS, options.new_tokens), floor)
    done = run_load(llm, random_prompts(options.requests, options.prompt_len, llm.vocab_size), options.new_tokens, floor)
    new = options.requests * options.new_tokens
    return {
        "requests": options.requests,
        "prompt_len": options.prompt_len,
        "new_tokens": options.new_tokens,
        **done.figures(),
        "new_tokens_per_s": new / done.seconds,
        "tokens_per_s": (new + options.requests * options.prompt_len) / done.seconds,
        "arrivals": done.arrivals,
    }


def profile(session: Session, options: argparse.Namespace) -> dict[str, Any]:
    """Where the time of such a load goes."""
    prompts = random_prompts(options.requests, options.prompt_len, session.llm.vocab_size, seed=2)
    return profile_load(session.llm, prompts, options.new_tokens)
