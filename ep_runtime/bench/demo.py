"""`demo`: decode speed of two ranks with one thread each against transformers with two threads, same checkpoint, same machine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ep_runtime.bench import report
from ep_runtime.bench.bandwidth import cpu_read
from ep_runtime.bench.ending import ended
from ep_runtime.demo.checkpoint import demo_checkpoint
from ep_runtime.frontend.text.tokenizer import Tokenizer

RANKS = 2
PROMPT = "The lighthouse keeper climbed the stairs every evening at dusk. One night, when the storm came in from the west,"
TARGET = 1.2
CHILD_SECONDS = 900
COLUMNS = {
    "dtype": "dtype",
    "ours_ms": "ours ms/token",
    "peer_ms": "transformers",
    "ratio": "ratio",
    "floor_ms": "floor",
    "over_floor": "ours/floor",
    "megabytes": "MB/rank",
    "http_ms": "over HTTP",
    "same_tokens": "same tokens",
}


class BenchFailed(Exception):
    """A child process failed; the message has the end of what it said."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    parser.add_argument("--model", type=Path, help="Mixtral folder with a tokenizer; by default the demo checkpoint")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="a comma between them (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2, help="times that ours and transformers alternate")
    parser.add_argument("--http", action="store_true", help="also measure through the server: serve, then stream")
    parser.add_argument("--out", type=Path, help="file for the result as JSON")


def run(options: argparse.Namespace) -> None:
    """Measure, print the table and write the JSON."""
    model = options.model or demo_checkpoint()
    prompt = Tokenizer.load(str(model)).encode(PROMPT, add_special_tokens=True)
    bandwidth = {threads: cpu_read(threads) for threads in (1, RANKS)}
    with tempfile.TemporaryDirectory(prefix="bench-demo-") as temporary:
        folder = Path(temporary)
        (folder / "prompt.json").write_text(json.dumps(prompt), encoding="utf-8")
        rows = [measure(model, dtype, folder, options, bandwidth[RANKS]) for dtype in options.dtypes.split(",")]
    result = {
        "benchmark": "demo",
        **report.environment(),
        "model": model.name,
        "prompt_tokens": len(prompt),
        "new_tokens": options.new_tokens,
        "read_gb_s_by_threads": {threads: round(value / 1e9, 2) for threads, value in bandwidth.items()},
        "target_ratio": TARGET,
        "rows": rows,
    }
    print(f"{result['processor']}, {result['cores']} cores; memory read at {result['read_gb_s_by_threads']} GB/s by threads")
    print(f"ours: {RANKS} ranks of one thread; transformers {result['transformers']}: {RANKS} threads")
    print(report.table(rows, COLUMNS))
    print("ratio: transformers over ours; floor: bytes of a rank over half of what two threads read")
    report.write(options.out, result)


def measure(model: Path, dtype: str, folder: Path, options: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    """One row: ours and transformers in turn, `options.rounds` times; medians over all steady steps."""
    ours: list[dict[str, Any]] = []
    peer: list[dict[str, Any]] = []
    for number in range(options.rounds):
        ours.append(run_ours(model, dtype, folder, options.new_tokens))
        peer.append(run_peer(model, dtype, folder, options.new_tokens, peer[0]["experts"] if peer else None))
        print(f"{dtype} round {number + 1}: ours {_median(ours[-1:]):.2f} ms, transformers {_median(peer[-1:]):.2f} ms", flush=True)
    http = run_http(model, dtype, folder, options.new_tokens) if options.http else None
    moved = sum(ours[0]["bytes"].values())
    floor = moved / (bandwidth / RANKS) * 1e3
    return {
        "dtype": dtype,
        "ours_ms": _median(ours),
        "peer_ms": _median(peer),
        "ratio": _median(peer) / _median(ours),
        "floor_ms": floor,
        "over_floor": _median(ours) / floor,
        "megabytes": moved / 1e6,
        "http_ms": _median([http]) if http else None,
        "same_tokens": all(run["tokens"] == ours[0]["tokens"] for run in [*ours, *peer, *([http] if http else [])]),
        "rounds": [{"ours_ms": _median([a]), "peer_ms": _median([b])} for a, b in zip(ours, peer, strict=True)],
        "bytes": ours[0]["bytes"],
        "peer_experts": peer[0]["experts"],
        "peer_attention": peer[0]["attention"],
    }


def run_ours(model: Path, dtype: str, folder: Path, new_tokens: int) -> dict[str, Any]:
    """The decode benchmark's row for one sequence on two ranks."""
    out = folder / "ours.json"
    arguments = ["--nproc-per-node", str(RANKS), "-m", "ep_runtime.bench", "decode", "--model", str(model), "--dtype", dtype]
    arguments += ["--device", "cpu", "--threads", "1", "--batch", "1", "--prompt-file", str(folder / "prompt.json")]
    arguments += ["--new-tokens", str(new_tokens), "--out", str(out)]
    run_child(["torch.distributed.run", "--standalone", *arguments], threads=1)
    row: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["rows"][0]
    return row


def run_peer(model: Path, dtype: str, folder: Path, new_tokens: int, experts: str | None) -> dict[str, Any]:
    """transformers' steps and tokens."""
    out = folder / "peer.json"
    arguments = ["--model", str(model), "--dtype", dtype, "--threads", str(RANKS), "--prompt-file", str(folder / "prompt.json")]
    arguments += ["--new-tokens", str(new_tokens), "--out", str(out), *(["--experts", experts] if experts else [])]
    run_child(["ep_runtime.bench.demo_peer", *arguments], threads=RANKS)
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def run_http(model: Path, dtype: str, folder: Path, new_tokens: int) -> dict[str, Any]:
    """The served model's stream, as a client sees it."""
    out = folder / "http.json"
    arguments = ["--model", str(model), "--dtype", dtype, "--ranks", str(RANKS), "--prompt-file", str(folder / "prompt.json")]
    run_child(["ep_runtime.bench.demo_http", *arguments, "--new-tokens", str(new_tokens), "--out", str(out)], threads=1)
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def run_child(module: Sequence[str], threads: int, timeout: float = CHILD_SECONDS) -> None:
    """Run `python -m module ...` to its end. Raises BenchFailed with the end of its output unless it ends with status 0 in time."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile() as words:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", *module],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=subprocess.STDOUT,
        )
        status = ended(child, timeout)
        if status != 0:
            words.seek(0)
            said = words.read().decode(errors="replace")[-3000:]
            how = f"took longer than {timeout:g} s" if status is None else f"ended with status {status}"
            raise BenchFailed(f"{module[0]} {how}:\n{said}")


def _median(runs: Sequence[dict[str, Any]]) -> float:
    return median(interval for one in runs for interval in one["intervals_ms"])
