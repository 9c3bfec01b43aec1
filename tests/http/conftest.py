"""Fixtures of the HTTP tests: one frontend process with a fake engine for most of them, fresh ones for those that end either."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ep_runtime.frontend.text.tokenizer import Tokenizer
from protocol.messages import Submit
from tests.support.fake_engine import FakeEngine
from tests.support.http_server import FrontendProcess
from tests.support.text_model import write_text_model

TEXT = "The quick brown fox jumps over the lazy dog. Paris is the capital of France."


class Stack:
    """A frontend process and the engine of its current epoch. `output` is what the engine writes for every request."""

    def __init__(self, model: Path, tokenizer: Tokenizer, **config: Any) -> None:
        self.tokenizer = tokenizer
        self.eos = tokenizer.eos_token_ids[0]
        self.output: str | list[int] = TEXT
        self.folder = Path(tempfile.mkdtemp(prefix="ep-"))
        self._settings = {"model": str(model), "served_model_name": ["tiny", "alias"], "max_queue": 8, **config}
        self.engines: list[FakeEngine] = []
        self._serve()

    def _serve(self) -> None:
        self.server = FrontendProcess(self.folder, **self._settings)
        self.url = self.server.url
        self.http = httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    def kill_and_restart(self) -> None:
        """Another frontend process in the place of the first, which had no time to say anything."""
        self.http.close()
        self.server.close()
        self._serve()

    def script(self, submit: Submit) -> list[int]:
        """`output` as tokens and an end token."""
        ids = self.tokenizer.encode(self.output, False) if isinstance(self.output, str) else self.output
        return [*ids, self.eos]

    def engine_of(self, epoch: int, **ready: Any) -> FakeEngine:
        """Start the engine of an epoch."""
        engine = FakeEngine(self.folder, epoch, self.script, eos=self.eos, vocab_size=self.tokenizer.vocab_size, **ready)
        self.engines.append(engine)
        return engine.start()

    @property
    def engine(self) -> FakeEngine:
        """The newest engine."""
        return self.engines[-1]

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=options.pop("api_key", "none"), max_retries=0, timeout=30, **options
        )

    def chat(self, **fields: Any) -> httpx.Response:
        """One plain chat request."""
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], **fields})

    def complete(self, **fields: Any) -> httpx.Response:
        """One plain completion request."""
        return self.http.post("/v1/completions", json={"prompt": "The quick", **fields})

    def close(self) -> None:
        """End everything that is left."""
        self.http.close()
        for engine in self.engines:
            engine.stop(announce=False)
        self.server.close()
        shutil.rmtree(self.folder)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text-model"))


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model)


@pytest.fixture(scope="session")
def shared(model: Path, tokenizer: Tokenizer) -> Iterator[Stack]:
    stack = Stack(model, tokenizer)
    stack.engine_of(1)
    assert stack.server.wait_line("out", "ready") == "ready"
    yield stack
    stack.close()


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    """The shared stack; after the test no sequence may be left in the engine's hands or the journal."""
    shared.output = TEXT
    shared.engine.clear()
    shared.engine.release()
    yield shared
    shared.engine.release()
    assert metric(shared, "ep_journal_sequences") == 0
    assert shared.server.process.poll() is None
    assert not any("Traceback" in line for line in shared.server.err), "\n".join(shared.server.err)


@pytest.fixture
def make_stack(model: Path, tokenizer: Tokenizer) -> Iterator[Callable[..., Stack]]:
    """Makes stacks of their own, without an engine."""
    stacks: list[Stack] = []

    def make(**config: Any) -> Stack:
        stacks.append(Stack(config.pop("model", model), tokenizer, **config))
        return stacks[-1]

    yield make
    for stack in stacks:
        stack.close()


def metric(stack: Stack, name: str) -> float:
    """The value of a metric without labels, or of one given with them."""
    for line in stack.http.get("/metrics").text.splitlines():
        if line.rpartition(" ")[0] == name:
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no metric {name}")


def wait_metric(stack: Stack, name: str, wanted: Callable[[float], bool]) -> None:
    """Read a metric until it is as wanted: what moves it is an event in another process, seen there alone."""
    deadline = time.monotonic() + 60
    while not wanted(metric(stack, name)):
        assert time.monotonic() < deadline, f"{name} stayed at {metric(stack, name)}"
