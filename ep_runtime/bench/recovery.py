"""`recovery`: kill engines under open streams; from the kill to the first new token of every stream, and where the time goes."""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ep_runtime.bench import report
from ep_runtime.bench.configs import CONFIGS, write_config
from ep_runtime.bench.served import Served
from ep_runtime.bench.tiny import write_tiny
from ep_runtime.supervise.source import model_folder

TINY = "tiny"
PHASES = ("leave", "spawn", "import", "load", "rendezvous")
COLUMNS = {
    "killed": "killed",
    "streams": "streams",
    "detect": "detect s",
    **{phase: f"{phase} s" for phase in PHASES},
    "replay": "replay s",
    "first": "first stream",
    "last": "last stream",
    "logprob_gap": "logprob gap",
    "replayed_gap": "after replay",
    "not_first": "not greedy",
}
LOOK_SECONDS = 0.005


@dataclass
class Stream:
    """One open stream: when its tokens came, and what they were."""

    prompt: list[int]
    stamps: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    parser.add_argument(
        "--model", default=TINY, help="model folder, 'tiny', or a published configuration by name, with dummy weights"
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kill", action="append", help="ranks to kill at once, a comma between them; once for each round")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--kill-after", type=int, default=20, help="tokens that every stream has at the kill")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--no-standby", action="store_true", help="no second engine process waits")
    parser.add_argument("--flag", action="append", default=[], help="one more flag of the server, as --flag=--name=value")
    parser.add_argument("--most-gap", type=float, default=0.02, help="a larger logprob gap is a failure")
    parser.add_argument("--log", type=Path, help="file for what the server prints")
    parser.add_argument("--out", type=Path, help="file for the result as JSON")


def run(options: argparse.Namespace) -> None:
    """Serve, kill, measure, print the table and write the JSON."""
    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as temporary:
        folder = Path(temporary)
        server = Served(options.ranks, server_flags(options, folder), options.log or folder / "log")
        try:
            kills = [[int(rank) for rank in one.split(",")] for one in options.kill or ["1", "0", "1,2"]]
            rows = [measure(server, ranks, number, options) for number, ranks in enumerate(kills)]
        finally:
            server.close()
    result = {"benchmark": "recovery", **report.environment(), "model": options.model, "ranks": options.ranks, "rows": rows}
    print(f"{result['processor']}, {result['cores']} cores; {options.ranks} ranks, {options.model}\n$ {result['command']}")
    print(report.table(rows, COLUMNS))
    print(
        "first, last stream: seconds from the kill to its next token. logprob gap: largest difference between the streamed logprobs"
    )
    print(
        "and those of the same tokens as one prompt, over all tokens and over those that came after the kill. not greedy: tokens of"
    )
    print("all streams that are not the likeliest there, which in bfloat16 near ties are")
    report.write(options.out, result)
    gap = max(row["logprob_gap"] for row in rows)
    if gap > options.most_gap:
        raise SystemExit(
            f"streamed logprobs differ from those of the same tokens as one prompt by {gap:.3g}, over {options.most_gap:g}"
        )


def server_flags(options: argparse.Namespace, folder: Path) -> list[str]:
    """The server's flags; models without a tokenizer get one of bytes."""
    model, load_format = find_model(options.model, folder / "model")
    flags = ["--model", str(model), "--served-model-name", "bench", "--device", options.device, "--dtype", options.dtype]
    flags += ["--load-format", load_format or options.load_format, "--generation-config", "none"]
    flags += ["--max-model-len", str(options.prompt_tokens + options.new_tokens + 1)]
    flags += ["--max-num-seqs", str(options.streams)] if options.device == "cpu" else []
    if not (Path(model) / "tokenizer.json").exists():
        flags += ["--tokenizer", str(write_tokenizer(folder / "tokenizer"))]
    if options.no_standby:
        flags.append("--no-standby")
    return [*flags, *options.flag]


def find_model(name: str, folder: Path) -> tuple[Path, str | None]:
    """The model's folder, and how it must be loaded; a configuration without weights is put into `folder`."""
    if name not in (TINY, *CONFIGS):
        return Path(model_folder(name)), None
    folder.mkdir()
    if name == TINY:
        write_tiny(folder)
        return folder, None
    write_config(name, folder)
    return folder, "dummy"


def write_tokenizer(folder: Path, size: int = 0) -> Path:
    """A tokenizer whose tokens are the bytes, and up to `size` words that are never read, but can be shown; returns its folder."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{number}" for number in range(len(alphabet), size)]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate([*alphabet, *words])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def measure(server: Served, ranks: Sequence[int], number: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row: streams, a kill, and what became of them."""
    server.settle(not options.no_standby)
    rng = random.Random(number)
    streams = [Stream([rng.randrange(1, 256) for _ in range(options.prompt_tokens)]) for _ in range(options.streams)]
    come = threading.Barrier(len(streams) + 1)
    threads = [threading.Thread(target=follow, args=(server, stream, options, come)) for stream in streams]
    for thread in threads:
        thread.start()
    come.wait()
    killed = server.kill(ranks)
    detected = watch_ready(server) - killed
    for thread in threads:
        thread.join()
    faults = [stream.error for stream in streams if stream.error]
    short = [len(stream.tokens) for stream in streams if len(stream.tokens) != options.new_tokens]
    if faults or short:
        raise RuntimeError(f"not every stream came to its end: {faults or short}")
    phases = recovery_phases(server.metrics())
    next_tokens = [min(at for at in stream.stamps if at > killed + detected) - killed for stream in streams]
    checks = [check_stream(server, stream, killed + detected) for stream in streams]
    row = {
        "killed": ",".join(map(str, ranks)),
        "streams": len(streams),
        "detect": detected,
        **{phase: phases.get(phase, 0.0) for phase in PHASES},
        "replay": max(next_tokens) - detected - phases["total"],
        "first": min(next_tokens),
        "last": max(next_tokens),
        **{name: max(check[name] for check in checks) for name in ("logprob_gap", "replayed_gap")},
        "not_first": sum(check["not_first"] for check in checks),
        "recovery_metrics": phases,
    }
    print(f"killed {row['killed']}: {row['last']:.2f} s to the last stream's next token", flush=True)
    return row


def follow(server: Served, stream: Stream, options: argparse.Namespace, come: threading.Barrier) -> None:
    """Read one stream to its end; meet the others when it has come far enough for the kill."""
    body = {
        "prompt": stream.prompt,
        "max_tokens": options.new_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    try:
        for at, choice in server.stream(body):
            tokens = choice.get("token_ids") or []
            met = len(stream.tokens) >= options.kill_after
            stream.stamps += [at] * len(tokens)
            stream.tokens += tokens
            stream.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
            if not met and len(stream.tokens) >= options.kill_after:
                come.wait()
    except (RuntimeError, OSError, threading.BrokenBarrierError) as error:
        stream.error = str(error)
        come.abort()


def watch_ready(server: Served) -> float:
    """The `perf_counter` time of the first /ready that is not 200."""
    while server.get("/ready")[0] == 200:
        time.sleep(LOOK_SECONDS)
    return time.perf_counter()


def recovery_phases(metrics: dict[str, float]) -> dict[str, float]:
    """Seconds of the last recovery by phase, as the server says."""
    prefix = 'ep_last_recovery_seconds{phase="'
    return {name.removeprefix(prefix).rstrip('"}'): value for name, value in metrics.items() if name.startswith(prefix)}


def check_stream(server: Served, stream: Stream, replayed_at: float) -> dict[str, float]:
    """By teacher forcing, the stream's tokens as one prompt: by how much the logprobs differ, how many are not the likeliest."""
    tokens = [*stream.prompt, *stream.tokens]
    answer = server.complete({"prompt": tokens, "max_tokens": 0, "prompt_logprobs": 0})
    forced = answer["choices"][0]["prompt_logprobs"][len(stream.prompt) :]
    entries = [entry[str(token)] for entry, token in zip(forced, stream.tokens, strict=True)]
    gaps = [abs(ours - entry["logprob"]) for ours, entry in zip(stream.logprobs, entries, strict=True)]
    replayed = [gap for gap, at in zip(gaps, stream.stamps, strict=True) if at > replayed_at]
    return {
        "logprob_gap": max(gaps),
        "replayed_gap": max(replayed, default=0.0),
        "not_first": sum(entry["rank"] != 1 for entry in entries),
    }
