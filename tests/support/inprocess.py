"""The frontend's application in this process, over queues in the place of sockets: every interleaving is the test's own choice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI

from ep_runtime.frontend.app import build_app
from ep_runtime.frontend.config import FrontendConfig
from ep_runtime.frontend.context import Frontend
from ep_runtime.frontend.engine_client import EngineClient
from ep_runtime.frontend.journal import Journal
from ep_runtime.frontend.metrics import Metrics
from ep_runtime.frontend.text_stack import TextStack
from protocol.codec import decode, encode
from protocol.messages import EpochEnded, EpochReady, Submit, ToEngine, ToFrontend
from tests.support.fake_sequences import FakeSequences, Script

PATIENCE_S = 120
"""A play that stands still is a failure."""


class QueueLink:
    """A `Link` whose engines are FakeSequences by epoch. What is sent to one that has ended is lost, as in a closed socket."""

    def __init__(self) -> None:
        self.engines: dict[int, FakeSequences] = {}
        self.sent: list[tuple[int, ToEngine]] = []
        self.activity = asyncio.Event()
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._epoch: int | None = None

    def put(self, message: ToFrontend) -> None:
        """Let the frontend receive a message."""
        self._inbox.put_nowait(encode(message))

    @property
    def drained(self) -> bool:
        """True when the frontend has received everything."""
        return self._inbox.empty()

    async def receive(self) -> bytes:
        """The frontend's next message."""
        return await self._inbox.get()

    def connect(self, epoch: int) -> None:
        """From now on `send` reaches this epoch's engine."""
        self._epoch = epoch

    def disconnect(self) -> None:
        """No engine runs."""
        self._epoch = None

    def send(self, message: ToEngine) -> None:
        """Hand a message to the engine, and its answer back."""
        assert self._epoch is not None
        message = decode(ToEngine, encode(message))
        self.sent.append((self._epoch, message))
        engine = self.engines.get(self._epoch)
        answer = None if engine is None else engine.take(message)
        if answer is not None:
            self.put(answer)
        self.activity.set()

    def close(self) -> None:
        """Nothing to release."""

    def submits(self, epoch: int) -> list[Submit]:
        """What was submitted in this epoch."""
        return [message for number, message in self.sent if number == epoch and isinstance(message, Submit)]


@dataclass(frozen=True)
class Cut:
    """An epoch that ends after `steps` results; one that is not `ready` never announces itself.

    Each element of `told` is one EpochEnded, suspicious or not; without any, the next announcement alone tells. Those of `late`
    come after that announcement.
    """

    steps: int
    told: tuple[bool, ...] = (False,)
    late: tuple[bool, ...] = ()
    ready: bool = True


@dataclass
class House:
    """One text stack and application for all plays; each play has its own event loop, journal and engines."""

    config: FrontendConfig
    text: TextStack
    ready: Callable[[int], EpochReady]
    app: FastAPI | None = None

    def play(
        self,
        requests: list[tuple[str, dict[str, Any]]],
        script: Script,
        cuts: list[Cut] | None = None,
        *,
        choose: Callable[[list[str]], list[str]] = lambda names: names,
        **engine: Any,
    ) -> Played:
        """Answer these requests (path, body) by engines that end as `cuts` says, and a last one that does not."""
        playing = self._play(requests, script, [*(cuts or []), None], choose, engine)
        return asyncio.run(asyncio.wait_for(playing, PATIENCE_S))

    async def _play(
        self,
        requests: list[tuple[str, dict[str, Any]]],
        script: Script,
        cuts: list[Cut | None],
        choose: Callable[[list[str]], list[str]],
        engine: dict[str, Any],
    ) -> Played:
        link, journal, metrics = QueueLink(), Journal(), Metrics()
        client = EngineClient(link, journal, metrics)
        front = Frontend(self.config, self.text, journal, client, metrics)
        if self.app is None:
            self.app = build_app(front, "0")
        self.app.state.frontend = front
        receiving = asyncio.create_task(client.run())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://test") as http:
            answers = [asyncio.create_task(http.post(path, json=body)) for path, body in requests]
            done = asyncio.gather(*answers)
            for epoch, cut in enumerate(cuts, start=1):
                sequences = FakeSequences(epoch, script, **engine)
                await self._run_epoch(link, sequences, cut, done, choose, last_cut(cuts, epoch))
            responses = await done
            while not link.drained:
                await asyncio.sleep(0)
            journal.check_integrity()
            assert client.held == 0, "the engine has not ended what the frontend ended, or the other way round"
            receiving.cancel()
        return Played(list(responses), link, metrics)

    async def _run_epoch(
        self,
        link: QueueLink,
        engine: FakeSequences,
        cut: Cut | None,
        done: asyncio.Future[Any],
        choose: Callable[[list[str]], list[str]],
        before: Cut | None,
    ) -> None:
        epoch = engine.epoch
        if cut is None or cut.ready:
            link.engines[epoch] = engine
            link.put(self.ready(epoch))
        for suspicious in () if before is None else before.late:
            link.put(ended(epoch - 1, suspicious))
        left = None if cut is None else cut.steps * cut.ready
        while left is None or left > 0:
            while not (engine.due() or engine.over or done.done()):
                link.activity.clear()
                waiting = asyncio.ensure_future(link.activity.wait())
                await asyncio.wait({waiting, done}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
            if done.done() or engine.over:
                break
            link.put(engine.step(choose(engine.due())))
            left = None if left is None else left - 1
            await asyncio.sleep(0)
        if cut is not None:
            link.engines.pop(epoch, None)
            for suspicious in cut.told:
                link.put(ended(epoch, suspicious))


def last_cut(cuts: list[Cut | None], epoch: int) -> Cut | None:
    """How the epoch before this one ended."""
    return cuts[epoch - 2] if epoch > 1 else None


def ended(epoch: int, suspicious: bool) -> EpochEnded:
    """What the coordinator says of a lost epoch."""
    return EpochEnded(epoch, "rank 1 was lost", final=False, suspicious=suspicious)


@dataclass
class Played:
    """The answers of a play, and what its frontend sent and counted."""

    responses: list[httpx.Response]
    link: QueueLink
    metrics: Metrics
    folded: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.folded = [fold(response) for response in self.responses]


def fold(response: httpx.Response) -> Any:
    """An answer without what differs between two runs; a stream as what its events add up to."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.status_code, plain(response.json())
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    choices: dict[int, dict[str, Any]] = {}
    rest: list[Any] = []
    for event in (json.loads(line.removeprefix("data: ")) for line in lines):
        if not event.get("choices"):
            rest.append(plain(event))
        for choice in event.get("choices", []):
            merge(choices.setdefault(choice["index"], {}), {key: value for key, value in choice.items() if key != "index"})
    return response.status_code, choices, rest


def merge(into: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece of an answer: texts and lists grow, pieces of one tool call join, other values come once."""
    for key, value in plain(piece).items():
        here = into.get(key)
        if value is None:
            continue
        if isinstance(value, dict):
            merge(into.setdefault(key, {}), value)
        elif key == "tool_calls":
            for call in value:
                merge(into.setdefault(key, {}).setdefault(call.pop("index"), {}), call)
        elif isinstance(value, (str, list)) and isinstance(here, type(value)) and key not in ("role", "finish_reason"):
            into[key] = here + value
        else:
            assert here is None or key == "role", f"{key} comes twice: {here!r}, {value!r}"
            into[key] = value


def plain(value: Any) -> Any:
    """A copy without ids that are drawn and times."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in ("id", "created")}
    return [plain(item) for item in value] if isinstance(value, list) else value
