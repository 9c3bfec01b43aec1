"""The client of `serve`: sends requests at their times over one pool of connections, and notes when each chunk came.

A process of its own, so that its cost can be told and spread: `python -m ep_runtime.bench.serve_client JOB OUT`. It says "ready",
reads the start (a `perf_counter` time, which is one clock for all processes of a host) as a line, and writes what it saw to OUT.
While requests are under way chunks are kept as they came; they are parsed when all is over.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ep_runtime.bench.serve_metrics import RequestRecord

REQUEST_SECONDS = 3600.0
PROBE_SECONDS = 0.05
END = b"data: [DONE]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one client sends: `requests` are (index, seconds after the start, JSON of a completion's body)."""

    url: str
    requests: list[tuple[int, float, str]]
    max_concurrency: int | None = None


@dataclass(kw_only=True, slots=True)
class Heard:
    """A request's bytes as they came, with their `perf_counter` times, before anything is made of them."""

    index: int
    due: float
    sent: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientCost:
    """What the client itself took: processor seconds and its share of the time that it ran, and by how much it is late.

    `late_ms`: from the moment at which a request could be sent to its sending. `lag_ms`: by how much the event loop was late for a
    timer of 50 ms; the times of chunks are late by as much. Both are percentile 99 and most.
    """

    cpu_seconds: float
    cpu_share: float
    pieces: int
    late_p99_ms: float
    late_max_ms: float
    lag_p99_ms: float
    lag_max_ms: float


def completion(model: str, prompt: Sequence[int], output_len: int) -> str:
    """The JSON of a streamed completion that gives exactly so many tokens, and counts them."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body)


async def run_job(job: Job, start: float) -> tuple[list[RequestRecord], ClientCost]:
    """Send everything at its time and read it to its end. Requests that fail are records with an error."""
    gate = nullcontext() if job.max_concurrency is None else asyncio.Semaphore(job.max_concurrency)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    lags: list[float] = []
    async with httpx.AsyncClient(
        base_url=job.url, headers={"Content-Type": "application/json"}, limits=limits, timeout=REQUEST_SECONDS, trust_env=False
    ) as client:
        await client.get("/v1/models")  # what the first request alone would pay for is done, and a server that is gone is noticed
        began, cpu = time.perf_counter(), time.process_time()
        probe = asyncio.ensure_future(watch_loop(lags))
        heard = await asyncio.gather(*[follow(client, index, start + at, body.encode(), gate) for index, at, body in job.requests])
        probe.cancel()
    cpu, took = time.process_time() - cpu, time.perf_counter() - began
    late = [one.sent - one.due for one in heard]
    cost = ClientCost(
        cpu_seconds=cpu,
        cpu_share=cpu / took,
        pieces=sum(len(one.pieces) for one in heard),
        late_p99_ms=1e3 * quantile(late, 0.99),
        late_max_ms=1e3 * max(late, default=0.0),
        lag_p99_ms=1e3 * quantile(lags, 0.99),
        lag_max_ms=1e3 * max(lags, default=0.0),
    )
    return [read_record(one) for one in heard], cost


async def follow(client: httpx.AsyncClient, index: int, due: float, body: bytes, gate: Any) -> Heard:
    """One request from its time on. Its clock starts when it is sent, after any wait for the gate."""
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    waited = not isinstance(gate, nullcontext) and gate.locked()
    async with gate:
        heard = Heard(index=index, due=time.perf_counter() if waited else due)
        heard.sent = time.perf_counter()
        try:
            async with client.stream("POST", "/v1/completions", content=body) as answer:
                heard.status = answer.status_code
                async for piece in answer.aiter_raw():
                    heard.pieces.append((time.perf_counter(), piece))
        except httpx.HTTPError as error:
            heard.error = f"{type(error).__name__}: {error}"
    return heard


async def watch_loop(lags: list[float]) -> None:
    """Note by how much a timer is late, until cancelled."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(PROBE_SECONDS)
        lags.append(time.perf_counter() - before - PROBE_SECONDS)


def read_record(heard: Heard) -> RequestRecord:
    """What a request's bytes say: the times of chunks with a choice, the tokens of its usage, and what went wrong."""
    stamps: list[float] = []
    usage: dict[str, Any] = {}
    error = heard.error
    ended = False
    if not error and heard.status != 200:
        error = f"status {heard.status}: {b''.join(piece for _, piece in heard.pieces).decode(errors='replace')[:500]}"
    for at, line in lines_of(heard.pieces) if not error else []:
        ended = ended or line == END
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            error = f"in the stream: {event['error']}"
        elif event.get("choices"):
            stamps.append(at)
        usage = event.get("usage") or usage
    if not error and not (ended and stamps and usage):
        error = f"the stream ended early: {len(stamps)} chunks, usage {usage or 'absent'}, end mark {'seen' if ended else 'absent'}"
    return RequestRecord(
        index=heard.index,
        due=heard.due,
        sent=heard.sent,
        stamps=stamps,
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        error=error,
    )


def lines_of(pieces: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Whole lines, each with the time of the piece that completed it."""
    found: list[tuple[float, bytes]] = []
    rest = b""
    for at, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        found += [(at, line.strip()) for line in lines]
    return [*found, (pieces[-1][0], rest.strip())] if pieces else found


def quantile(values: Sequence[float], share: float) -> float:
    """The value that so many of them do not exceed, 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def main() -> None:
    """Read the job, wait for the start, run, write."""
    job_file, out = Path(sys.argv[1]), Path(sys.argv[2])
    job = Job(**json.loads(job_file.read_text(encoding="utf-8")))
    gc.collect()
    gc.disable()  # a collection over all that is kept would be a pause in the times
    print("ready", flush=True)
    start = float(sys.stdin.readline())
    records, cost = asyncio.run(run_job(job, start))
    out.write_text(json.dumps({"records": [asdict(record) for record in records], "cost": asdict(cost)}), encoding="utf-8")


if __name__ == "__main__":
    main()
