"""Short requests of mixed kinds from several clients, some of which leave before their answer ends. Every answer is checked."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

CLIENTS = 8
TIMEOUT_SECONDS = 120.0
KINDS = ("plain", "stream", "seeded", "n=2", "stop", "json", "logprobs", "leaves at once", "leaves a stream", "leaves a stream")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "Paris", "is", "the", "capital", "of", "France"]


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the plan. `leave_after` is the number of events after which its client goes away, None to stay."""

    kind: str
    body: dict[str, Any]
    choices: int = 1
    leave_after: int | None = None


def plan(seed: int, number: int) -> Request:
    """Request `number` of a seed."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choice(KINDS)
    text = " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 4, 12])))
    body: dict[str, Any] = {"prompt": text, "max_tokens": rng.choice([2, 8, 16]), "temperature": 0.0, "ignore_eos": True}
    match kind:
        case "stream":
            return Request(kind, body | {"stream": True})
        case "seeded":
            return Request(kind, body | {"temperature": 0.9, "top_p": 0.9, "seed": number})
        case "n=2":
            return Request(kind, body | {"n": 2, "temperature": 1.0, "seed": number, "stream": rng.random() < 0.5}, choices=2)
        case "stop":
            return Request(kind, body | {"stop": [rng.choice("aeiou"), "th"], "temperature": 1.0, "seed": number})
        case "json":
            return Request(kind, body | {"response_format": {"type": "json_object"}, "ignore_eos": False})
        case "logprobs":
            return Request(kind, body | {"logprobs": 2, "echo": rng.random() < 0.5})
        case "leaves at once":
            return Request(kind, body, leave_after=0)
        case "leaves a stream":
            return Request(kind, body | {"stream": True, "max_tokens": 200}, leave_after=rng.choice([1, 2, 5]))
    return Request(kind, body)


@dataclass(slots=True)
class Tally:
    """What became of all requests. `sequences` counts those that were seen to end; `left` those whose client went away."""

    ended: dict[str, int] = field(default_factory=dict)
    sequences: int = 0
    left: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)


class Load:
    """Sends `count` requests, evenly over `seconds` where the server is quick enough, otherwise as fast as it answers."""

    def __init__(self, port: int, *, seed: int, count: int, seconds: float) -> None:
        self.tally = Tally()
        self._port, self._seed, self._count = port, seed, count
        self._pace = seconds / count
        self._next = 0
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, name=f"client-{index}", daemon=True) for index in range(CLIENTS)]

    def start(self) -> Load:
        """Begin."""
        for thread in self._threads:
            thread.start()
        return self

    @property
    def running(self) -> bool:
        """True until every client has ended."""
        return any(thread.is_alive() for thread in self._threads)

    def join(self, timeout: float) -> None:
        """Wait for the end, or `timeout` seconds."""
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _take(self) -> int | None:
        with self._lock:
            number = self._next
            self._next += 1
            return number if number < self._count and len(self.tally.faults) < 20 else None

    def _client(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_SECONDS)
        while (number := self._take()) is not None:
            self._stop.wait(max(0.0, self._began + number * self._pace - time.monotonic()))
            request = plan(self._seed, number)
            try:
                self._send(connection, request)
            except Exception as fault:
                connection.close()
                with self._lock:
                    self.tally.faults.append(f"request {number} ({request.kind}): {type(fault).__name__}: {fault}")
        connection.close()

    def _send(self, connection: http.client.HTTPConnection, request: Request) -> None:
        while True:
            connection.request("POST", "/v1/completions", json.dumps(request.body), {"Content-Type": "application/json"})
            if request.leave_after == 0:
                connection.close()
                self._note(request, left=True)
                return
            response = connection.getresponse()
            if response.status != 503:
                break
            # Between two epochs a server may refuse, and says when to come again.
            wait = float(response.headers["Retry-After"])
            response.read()
            with self._lock:
                self.tally.refused += 1
            self._stop.wait(wait)
        assert response.status == 200, f"{response.status}: {response.read()[:500]!r}"
        if not request.body.get("stream"):
            finished = [choice["finish_reason"] for choice in json.loads(response.read())["choices"]]
        elif request.leave_after is not None:
            for _ in range(2 * request.leave_after):
                response.readline()
            response.close()
            connection.close()
            self._note(request, left=True)
            return
        else:
            finished = read_stream(response)
        assert len(finished) == request.choices, f"{len(finished)} ends of {request.choices} choices"
        assert set(finished) <= {"stop", "length"}, f"ended with {finished}"
        self._note(request, left=False)

    def _note(self, request: Request, *, left: bool) -> None:
        with self._lock:
            self.tally.ended[request.kind] = self.tally.ended.get(request.kind, 0) + 1
            if left:
                self.tally.left += request.choices
            else:
                self.tally.sequences += request.choices


def read_stream(response: http.client.HTTPResponse) -> list[str]:
    """The finish reasons of a stream, which must end with [DONE]."""
    events = [part.removeprefix(b"data: ") for part in response.read().split(b"\n\n") if part]
    assert events[-1:] == [b"[DONE]"], f"the stream ended with {events[-1:]}"
    chunks = [json.loads(event) for event in events[:-1]]
    assert not any("error" in chunk for chunk in chunks), chunks
    return [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"] is not None]
