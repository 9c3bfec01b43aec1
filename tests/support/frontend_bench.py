"""CPU time of the HTTP process per streamed token: `python -m tests.support.frontend_bench --streams 64 --tokens 100`.

A real frontend process, an engine without a model that makes one token of every stream a step, and a client that reads each step's
events before it asks for the next step, so that nothing is merged that a real engine would send apart.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import tempfile
from pathlib import Path
from typing import Any

from ep_runtime.frontend.text.tokenizer import Tokenizer
from protocol.messages import Submit
from tests.support.fake_engine import FakeEngine
from tests.support.http_server import FrontendProcess
from tests.support.text_model import write_text_model

TEXT = "The quick brown fox jumps over the lazy dog. Paris is the capital of France. " * 8
WARM_STEPS = 5


class Streams:
    """Open event streams of one server, read together."""

    def __init__(self, url: str, path: str, body: dict[str, Any], count: int) -> None:
        host, port = url.removeprefix("http://").split(":")
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self.events = [0] * count
        self._selector = selectors.DefaultSelector()
        self._socks = []
        for index in range(count):
            sock = socket.create_connection((host, int(port)))
            sock.sendall(head.encode() + data)
            self._selector.register(sock, selectors.EVENT_READ, index)
            self._socks.append(sock)

    def read(self, events: int) -> None:
        """Return when every stream has given this many events."""
        while min(self.events) < events:
            for key, _ in self._selector.select():
                data = self._socks[key.data].recv(1 << 16)
                assert data, "a stream ended early"
                self.events[key.data] += data.count(b"data: {")

    def close(self) -> None:
        """Leave."""
        self._selector.close()
        for sock in self._socks:
            sock.close()


def measure(streams: int, tokens: int, path: str, logprobs: bool) -> float:
    """CPU seconds of the frontend per token."""
    with tempfile.TemporaryDirectory(prefix="ep-") as name:
        folder = Path(name)
        model = write_text_model(folder / "model")
        tokenizer = Tokenizer.load(model)
        ids = tokenizer.encode(TEXT, False)

        def script(submit: Submit) -> list[int]:
            return ids

        eos = tokenizer.eos_token_ids[0]
        server = FrontendProcess(folder, model=str(model), served_model_name=["tiny"])
        engine = FakeEngine(folder, 1, script, eos=eos, vocab_size=tokenizer.vocab_size, held=True, max_num_seqs=streams)
        try:
            engine.start()
            server.wait_line("out", "ready")
            body: dict[str, Any] = {"stream": True, "max_tokens": tokens + WARM_STEPS + 10, "ignore_eos": True}
            chat = "chat" in path
            body |= {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Hi"}
            if logprobs:
                body |= {"logprobs": True, "top_logprobs": 5} if chat else {"logprobs": 5}
            client = Streams(server.url, path, body, streams)
            engine.submits(streams)
            pid = server.process.pid
            started = 0.0
            for step in range(1, WARM_STEPS + tokens + 1):
                engine.step(1)
                client.read(step + (1 if chat else 0))
                if step == WARM_STEPS:
                    started = cpu_seconds(pid)
            used = cpu_seconds(pid) - started
            client.close()
            return used / (streams * tokens)
        finally:
            engine.stop(announce=False)
            server.close()


def cpu_seconds(pid: int) -> float:
    """Time on a CPU of all threads of a process, from the scheduler's own account: ticks miss short bursts."""
    found = [task.read_text().split()[0] for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(value) for value in found) * 1e-9


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=60)
    flags = parser.parse_args()
    for path in ("/v1/chat/completions", "/v1/completions"):
        for logprobs in (False, True):
            for streams in flags.streams:
                cost = measure(streams, flags.tokens, path, logprobs)
                what = " with 5 logprobs" if logprobs else ""
                print(f"{path}{what}, {streams} streams: {cost * 1e6:.1f} us CPU per token", flush=True)


if __name__ == "__main__":
    main()
