"""The demo benchmark through HTTP: serve with torchrun, stream one completion, time its chunks."""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ep_runtime.bench.ending import end_what_was_started
from ep_runtime.bench.steps import SETTLE
from ep_runtime.demo.server import end, wait_ready

WARM_TOKENS = 8


def main() -> None:
    """Serve, stream, write the result."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.bench.demo_http", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    prompt = json.loads(options.prompt_file.read_text(encoding="utf-8"))
    port = free_port()
    arguments = ["--nproc-per-node", str(options.ranks), "-m", "ep_runtime.serve", "--model", options.model, "--device", "cpu"]
    arguments += ["--dtype", options.dtype, "--threads", "1", "--port", str(port), "--served-model-name", "demo"]
    arguments += ["--max-model-len", str(len(prompt) + options.new_tokens)]
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_ready(server, f"http://127.0.0.1:{port}/ready")
        list(stream(port, prompt, WARM_TOKENS))
        chunks = list(stream(port, prompt, options.new_tokens))
    finally:
        end(server)
    stamps = [at for at, _ in chunks]
    intervals = [1e3 * (now - before) for before, now in itertools.pairwise(stamps)]
    tokens = [token for _, ids in chunks for token in ids]
    options.out.write_text(json.dumps({"intervals_ms": intervals[SETTLE:], "tokens": tokens}), encoding="utf-8")


def stream(port: int, prompt: list[int], new_tokens: int) -> Iterator[tuple[float, list[int]]]:
    """(time, token ids) of every chunk with tokens. Raises RuntimeError when the server refuses."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"the server answered {response.status}: {response.read().decode()}")
    for line in response:
        text = line.decode().strip()
        if not text.startswith("data: ") or text == "data: [DONE]":
            continue
        ids = token_ids(json.loads(text.removeprefix("data: ")))
        if ids:
            yield time.perf_counter(), ids
    connection.close()


def token_ids(chunk: dict[str, Any]) -> list[int]:
    """The token ids that a streamed completion chunk brings."""
    return [token for choice in chunk.get("choices", []) for token in choice.get("token_ids") or []]


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


if __name__ == "__main__":
    end_what_was_started()
    main()
