"""`prefill` and `throughput`: how fast prompts are taken in, and how long a whole load of requests takes."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from ep_runtime.bench import report
from ep_runtime.bench.session import Session, add_model_arguments, check_complete, greedy, numbers, open_session, random_prompts

PREFILL_COLUMNS = {"prompts": "prompts", "prompt_len": "tokens each", "seconds": "seconds", "tokens_per_s": "tokens/s"}
LOAD_COLUMNS = {
    "requests": "requests",
    "prompt_len": "in",
    "new_tokens": "out",
    "seconds": "seconds",
    "new_tokens_per_s": "out tokens/s",
    "tokens_per_s": "all tokens/s",
}


def add_prefill_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `prefill`."""
    add_model_arguments(parser)
    parser.add_argument("--batch", type=numbers, default=[1, 8], metavar="N,N", help="prompts at once")
    parser.add_argument("--prompt-len", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=3, help="the median is shown")


def run_prefill(options: argparse.Namespace) -> None:
    """From all prompts handed over to the first token of the last: tokens per second."""
    with open_session(options, sequences=max(options.batch), length=options.prompt_len + 2) as session:
        rows = [prefill_row(session, batch, options.prompt_len, options.repeat) for batch in options.batch]
        _show("prefill", session, rows, PREFILL_COLUMNS, options)


def prefill_row(session: Session, batch: int, prompt_len: int, repeat: int) -> dict[str, Any]:
    """The median of `repeat` runs, after one that is not counted; every run has prompts of its own."""
    seconds = []
    for number in range(repeat + 1):
        prompts = random_prompts(batch, prompt_len, session.llm.vocab_size, seed=number)
        seconds.append(_timed(session, prompts, 1))
    median = statistics.median(seconds[1:])
    return {
        "prompts": batch,
        "prompt_len": prompt_len,
        "seconds": median,
        "tokens_per_s": batch * prompt_len / median,
        "all": seconds,
    }


def add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `throughput`."""
    add_model_arguments(parser)
    parser.add_argument("--requests", type=int, default=256, help="all handed over at once")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=256)


def run_throughput(options: argparse.Namespace) -> None:
    """Seconds from the first request handed over to the last token of all."""
    length = options.prompt_len + options.new_tokens
    with open_session(options, sequences=options.max_num_seqs, length=length) as session:
        vocab = session.llm.vocab_size
        _timed(session, random_prompts(min(8, options.requests), options.prompt_len, vocab, seed=1), min(8, options.new_tokens))
        seconds = _timed(session, random_prompts(options.requests, options.prompt_len, vocab), options.new_tokens)
        row = {
            "requests": options.requests,
            "prompt_len": options.prompt_len,
            "new_tokens": options.new_tokens,
            "seconds": seconds,
            "new_tokens_per_s": options.requests * options.new_tokens / seconds,
            "tokens_per_s": options.requests * length / seconds,
        }
        _show("throughput", session, [row], LOAD_COLUMNS, options)


def _timed(session: Session, prompts: list[list[int]], new_tokens: int) -> float:
    start = time.perf_counter()
    outputs = session.llm.generate(prompts, greedy(new_tokens))
    seconds = time.perf_counter() - start
    check_complete(outputs, new_tokens)
    return seconds


def _show(kind: str, session: Session, rows: list[dict[str, Any]], columns: dict[str, str], options: argparse.Namespace) -> None:
    about = session.describe()
    result = {"benchmark": kind, **report.environment(), **about, "memory_bytes": session.llm.memory_bytes(), "rows": rows}
    print(", ".join(f"{name} {about[name]}" for name in ("model", "ranks", "dtype", "device", "forward_mode", "ready_seconds")))
    print(report.table(rows, columns))
    report.write(options.out, result)
