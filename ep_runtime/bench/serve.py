"""`serve`: requests over HTTP at the times of a Poisson process; goodput, throughput, TTFT, TPOT, ITL and E2EL."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from ep_runtime.bench import plots, report
from ep_runtime.bench.configs import CONFIGS
from ep_runtime.bench.recovery import TINY, find_model
from ep_runtime.bench.serve_client import Job, completion
from ep_runtime.bench.serve_load import LoadShape, PlannedRequest, add_load_arguments, plan_load, share_out
from ep_runtime.bench.serve_metrics import RequestRecord, parse_objectives, result_text, summarise
from ep_runtime.bench.served import Served
from ep_runtime.bench.served_flags import server_flags

UNKNOWN_VOCABULARY = 10_000
"""Token ids of random prompts for a server whose vocabulary is not known."""

START_SECONDS = 0.5
"""From the last client's word that it is ready to the first request."""

BUSY = 0.8
"""Share of a core above which a client may be what is measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help="a server that runs, such as http://127.0.0.1:8000; otherwise one is started")
    source.add_argument("--model", help=f"model folder to serve, or {TINY}")
    source.add_argument("--config-name", choices=sorted(CONFIGS), help="a published configuration to serve, with dummy weights")
    parser.add_argument("--served-model-name", help="model that requests name (default: the server's first)")
    parser.add_argument("--vocab-size", type=int, help="prompts are of token ids below this (default: the model's)")
    add_load_arguments(parser)
    parser.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="a request is good within these: ttft:200 tpot:50 e2el:4000"
    )
    parser.add_argument("--num-warmups", type=int, default=1, help="requests before, which are not counted (default: %(default)s)")
    parser.add_argument(
        "--clients", type=int, default=default_clients(os.cpu_count() or 1), help="processes that send (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=int, default=1, help="of the server that is started")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--flag", action="append", default=[], help="one more flag of the server, as --flag=--name=value")
    parser.add_argument("--log", type=Path, help="file for what the server prints")
    parser.add_argument("--save-detailed", action="store_true", help="also write every request's lengths and times")
    report.add_output_arguments(parser)


def default_clients(cores: int) -> int:
    """One for each four cores, at most eight."""
    return max(1, min(8, cores // 4))


def run(options: argparse.Namespace) -> None:
    """Serve if need be, send, print the result and write the JSON."""
    try:
        objectives = parse_objectives(options.goodput)
    except ValueError as error:
        raise SystemExit(f"--goodput: {error}") from error
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as temporary:
        folder = Path(temporary)
        if options.url is not None:
            server = {"url": options.url, "vocab_size": options.vocab_size or UNKNOWN_VOCABULARY}
            result, records = drive(options, server, objectives, folder)
        else:
            flags, vocab_size = found_flags(options, folder)
            began = time.perf_counter()
            served = Served(options.ranks, flags, options.log or folder / "log")
            start_seconds = time.perf_counter() - began
            try:
                server = {"url": f"http://127.0.0.1:{served.port}", "vocab_size": options.vocab_size or vocab_size}
                result, records = drive(options, server, objectives, folder)
            finally:
                served.close()
            result |= {"ranks": options.ranks, "start_seconds": start_seconds, "server_flags": flags}
    print(result_text(result))
    print(cost_text(result["clients"]))
    if result["failed"]:
        print(f"{result['failed']} requests failed; the first: {next(record.error for record in records if record.error)}")
    if options.save_detailed:
        result |= detailed(records)
    report.write(options.out, result)
    plots.save(options.plot, result | detailed(records))


def found_flags(options: argparse.Namespace, folder: Path) -> tuple[list[str], int]:
    """The server's flags, and the size of the model's vocabulary."""
    model, load_format = find_model(options.model or options.config_name, folder / "model")
    tokens = math.ceil((options.random_input_len + options.random_output_len) * (1 + options.random_range_ratio))
    return server_flags(
        model,
        options.served_model_name or options.config_name or model.name,
        folder,
        device=options.device,
        dtype=options.dtype,
        load_format=load_format or options.load_format,
        max_model_len=tokens + 1,
        max_num_seqs=options.max_num_seqs,
        more=["--max-queue", str(max(256, options.num_prompts)), *options.flag],
    )


def drive(
    options: argparse.Namespace, server: dict[str, Any], objectives: dict[str, float], folder: Path
) -> tuple[dict[str, Any], list[RequestRecord]]:
    """Warm the server, send the load from all clients, and make the result of what they saw."""
    with httpx.Client(base_url=server["url"], timeout=600.0, trust_env=False) as client:
        model = options.served_model_name or client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        shape = load_shape(options, server["vocab_size"], options.seed)
        for warmup in plan_load(load_shape(options, server["vocab_size"], options.seed + 1))[: options.num_warmups]:
            body = completion(model, warmup.prompt, warmup.output_len)
            answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
            if answer.is_error:
                raise SystemExit(f"the server refuses a warm-up request with {answer.status_code}: {answer.text}")
    requests = plan_load(shape)
    start, records, costs = send(requests, server["url"], model, options, folder)
    result = {
        "benchmark": "serve",
        **report.environment(),
        "backend": "openai",
        "endpoint": "/v1/completions",
        "base_url": server["url"],
        "model_id": model,
        "dataset_name": "random",
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "max_concurrency": options.max_concurrency,
        "random_input_len": options.random_input_len,
        "random_output_len": options.random_output_len,
        "random_range_ratio": options.random_range_ratio,
        "seed": options.seed,
        "goodput": objectives,
        **summarise(records, start, objectives),
        "clients": costs,
        "errors": [record.error for record in records if record.error][:10],
    }
    short = [record for record in records if not record.error and record.completion_tokens != requests[record.index].output_len]
    if short:
        raise RuntimeError(
            f"request {short[0].index} gave {short[0].completion_tokens} of {requests[short[0].index].output_len} tokens, "
            f"and so did {len(short) - 1} others"
        )
    return result, records


def load_shape(options: argparse.Namespace, vocab_size: int, seed: int) -> LoadShape:
    """The load that the flags describe."""
    return LoadShape(
        num_prompts=options.num_prompts,
        request_rate=options.request_rate,
        input_len=options.random_input_len,
        output_len=options.random_output_len,
        range_ratio=options.random_range_ratio,
        vocab_size=vocab_size,
        seed=seed,
    )


def send(
    requests: Sequence[PlannedRequest], url: str, model: str, options: argparse.Namespace, folder: Path
) -> tuple[float, list[RequestRecord], list[dict[str, Any]]]:
    """The start, the records in order of their requests, and what each client took."""
    clients = max(1, min(options.clients, len(requests), options.max_concurrency or len(requests)))
    outs = []
    processes: list[subprocess.Popen[str]] = []
    try:
        for number, (indices, concurrency) in enumerate(share_out(requests, options.max_concurrency, clients)):
            bodies = [(i, requests[i].at, completion(model, requests[i].prompt, requests[i].output_len)) for i in indices]
            job, out = folder / f"job-{number}.json", folder / f"out-{number}.json"
            job.write_text(json.dumps(asdict(Job(url=url, requests=bodies, max_concurrency=concurrency))))
            outs.append(out)
            processes.append(_client(job, out))
        start = _begin(processes)
        for process in processes:
            if process.wait() != 0:
                raise RuntimeError(f"a client ended with status {process.returncode}")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    found = [json.loads(out.read_text(encoding="utf-8")) for out in outs]
    records = [RequestRecord(**record) for one in found for record in one["records"]]
    return start, sorted(records, key=lambda record: record.index), [one["cost"] for one in found]


def _client(job: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "ep_runtime.bench.serve_client", str(job), str(out)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _begin(processes: Sequence[subprocess.Popen[str]]) -> float:
    for process in processes:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError(f"a client ended with status {process.wait()} before it was ready")
    start = time.perf_counter() + START_SECONDS
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{start!r}\n")
        process.stdin.flush()
    return start


def cost_text(costs: Sequence[dict[str, Any]]) -> str:
    """What the clients took, and a warning when one of them may be the bottleneck."""
    share = max(cost["cpu_share"] for cost in costs)
    pieces = sum(cost["pieces"] for cost in costs)
    each = 1e6 * sum(cost["cpu_seconds"] for cost in costs) / max(1, pieces)

    def worst(name: str) -> float:
        return max(cost[name] for cost in costs)

    text = (
        f"clients: {len(costs)}, busiest {100 * share:.0f} % of a core, {each:.0f} us a chunk read; sending late by "
        f"{worst('late_p99_ms'):.2f} ms (p99), {worst('late_max_ms'):.2f} (most); their event loops by {worst('lag_p99_ms'):.2f}, "
        f"{worst('lag_max_ms'):.2f}"
    )
    return f"{text}\nthe busiest client may be what is measured: give more --clients" if share > BUSY else text


def detailed(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Every request's lengths and times in seconds, failures as empty, by vLLM's names."""

    def each(take: Callable[[RequestRecord], Any], none: Any) -> list[Any]:
        return [none if record.error else take(record) for record in records]

    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.completion_tokens for record in records],
        "start_times": [record.sent for record in records],
        "ttfts": each(lambda record: record.ttft, 0.0),
        "itls": each(lambda record: record.itls, []),
        "e2els": each(lambda record: record.e2el, 0.0),
    }
