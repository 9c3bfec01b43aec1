"""Requests of every kind from a seed, and clients that send them and write down everything that they are answered."""

from __future__ import annotations

import http.client
import json
import queue
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

CLIENT_SECONDS = 180.0
MARKERS = range(3, 13)
"""Token ids that no random prompt has."""
WORDS = ("the", "quick", "brown", "fox", "Paris", "is", "one", "seven", "city", "jumps", "of", "France")


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request: its path and JSON body."""

    number: int
    path: str
    body: dict[str, Any]

    @property
    def stream(self) -> bool:
        """Whether the answer is streamed."""
        return bool(self.body.get("stream"))


@dataclass(slots=True)
class Sample:
    """One choice of an answer. `finishes` counts the terminal events that it got."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    stop_reason: Any = None
    finishes: int = 0


@dataclass(slots=True)
class Answer:
    """All that a client saw of one request. `ends`: whole bodies, or [DONE]s; `after`: events that came after the end.

    `prompt_ids`: the prompt's tokens as a chat says them.
    """

    status: int = 0
    prompt_ids: list[int] = field(default_factory=list)
    samples: dict[int, Sample] = field(default_factory=dict)
    error: str = ""
    ends: int = 0
    after: int = 0
    broken: str = ""

    def sample(self, index: int) -> Sample:
        """The choice of this index."""
        return self.samples.setdefault(index, Sample())


def long_stream(number: int, rng: random.Random, vocab: int) -> Request:
    """A stream of sixty tokens that nothing ends early: its tokens are the clock that faults go by."""
    body = {"prompt": prompt(rng, vocab), "max_tokens": 60, "ignore_eos": True, "stream": True, "return_token_ids": True}
    if rng.random() < 0.5:
        body |= {"temperature": 0.0}
    else:
        body |= {"temperature": 0.9, "seed": rng.randrange(1 << 40)}
    return Request(number, "/v1/completions", body)


def mixed_request(number: int, rng: random.Random, vocab: int) -> Request:
    """A request of random kind: completion or chat, streamed or not, greedy or not, with stops, penalties, grammars, logprobs."""
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 60), "return_token_ids": True, "stream": rng.random() < 0.5}
    if rng.random() < 0.4:
        body |= {"temperature": 0.0}
    else:
        body |= {"temperature": rng.choice([0.6, 1.0, 1.4]), "seed": rng.randrange(1 << 40), "n": rng.choice([1, 1, 2])}
        body |= {"top_p": rng.choice([1.0, 0.8]), "top_k": rng.choice([0, 0, 20])}
    if rng.random() < 0.3:
        body |= {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
    if rng.random() < 0.3:
        body |= {"stop": rng.sample([" ", "e", "th", "an", "o", "."], 2)}
    if rng.random() < 0.2:
        body |= {"logit_bias": {str(rng.randrange(vocab)): rng.choice([-100.0, 2.0]) for _ in range(3)}}
    draw = rng.random()
    if draw < 0.3:
        body |= {"ignore_eos": True}
    elif draw < 0.5:
        body |= {"response_format": {"type": "json_object"}}
    chat = rng.random() < 0.3
    if rng.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    if chat:
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
        return Request(number, "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]})
    if not body["stream"] and rng.random() < 0.5:
        body |= {"prompt_logprobs": 1}
    return Request(number, "/v1/completions", body | {"prompt": prompt(rng, vocab)})


def prompt(rng: random.Random, vocab: int) -> list[int]:
    """Random tokens, none of them special and none of `MARKERS`."""
    return [rng.randrange(MARKERS.stop, vocab) for _ in range(rng.choice([1, 3, 8, 15, 16, 17, 30, 48]))]


def send(port: int, request: Request, on_tokens: Callable[[int], None] = lambda _: None) -> Answer:
    """Send one request and read its answer to the end. `on_tokens` is called with the number of streamed tokens so far."""
    answer = Answer()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CLIENT_SECONDS)
    try:
        connection.request("POST", request.path, json.dumps(request.body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer.status = response.status
        if request.stream and response.status == 200:
            for line in response:
                _take_event(answer, line.decode().strip())
                on_tokens(sum(len(sample.token_ids) for sample in answer.samples.values()))
            if not answer.ends:  # http.client may take a broken connection for the end of the body
                answer.broken = "the stream ended without [DONE]"
        else:
            _take_body(answer, json.loads(response.read()))
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.broken = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return answer


def _take_event(answer: Answer, line: str) -> None:
    if not line:
        return
    if answer.ends:
        answer.after += 1
    if line == "data: [DONE]":
        answer.ends += 1
    elif line.startswith("data: "):
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            answer.error = event["error"]["message"]
        _take_choices(answer, event)
    elif not line.startswith(":"):
        answer.broken = f"the line {line[:80]!r}"


def _take_body(answer: Answer, body: dict[str, Any]) -> None:
    answer.ends += 1
    if "error" in body:
        answer.error = body["error"]["message"]
    _take_choices(answer, body)


def _take_choices(answer: Answer, given: dict[str, Any]) -> None:
    answer.prompt_ids += given.get("prompt_token_ids") or []
    for choice in given.get("choices", []):
        _take_choice(answer, choice)


def _take_choice(answer: Answer, choice: dict[str, Any]) -> None:
    sample = answer.sample(choice["index"])
    if sample.finishes and (choice.get("token_ids") or choice.get("finish_reason")):
        answer.after += 1
    said = choice.get("message") or choice.get("delta") or {}
    sample.text += choice.get("text") or said.get("content") or ""
    sample.token_ids += choice.get("token_ids") or []
    given = choice.get("logprobs") or {}
    sample.logprobs += [entry["logprob"] for entry in given.get("content") or []] or given.get("token_logprobs") or []
    sample.prompt_logprobs += [next(iter(entry.values()))["logprob"] for entry in choice.get("prompt_logprobs") or [] if entry]
    if choice.get("finish_reason") is not None:
        sample.finishes += 1
        sample.finish, sample.stop_reason = choice["finish_reason"], choice.get("stop_reason")


class Clients:
    """`count` threads that send what is put to them. `answers` is complete after `join`."""

    def __init__(self, port: int, count: int) -> None:
        self.answers: dict[int, Answer] = {}
        self._port = port
        self._todo: queue.Queue[tuple[Request, Callable[[int], None]] | None] = queue.Queue()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def put(self, requests: Iterable[Request], on_tokens: Callable[[int], None] = lambda _: None) -> None:
        """Send these as soon as clients are free."""
        for request in requests:
            self._todo.put((request, on_tokens))

    def join(self) -> dict[int, Answer]:
        """Every answer, by the request's number, when all have ended."""
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join(CLIENT_SECONDS)
            assert not thread.is_alive(), "a client still waits for its answer"
        return self.answers

    def _run(self) -> None:
        while (task := self._todo.get()) is not None:
            request, on_tokens = task
            self.answers[request.number] = send(self._port, request, on_tokens)
