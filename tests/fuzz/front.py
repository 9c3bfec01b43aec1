"""The real HTTP process over a scripted engine, and batches of visits to it. A batch is a case."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from ep_runtime.frontend.text.tokenizer import Tokenizer
from protocol.codec import decode
from protocol.errors import EpFrameCorrupt
from protocol.messages import ToFrontend
from tests.fuzz.client import BOUND_SECONDS, Wrong, check_answer, converse
from tests.fuzz.decoders import message_bytes
from tests.fuzz.requests import BODIES, CHAT, Visit, dump, request
from tests.fuzz.wires import visit
from tests.support.fake_engine import FakeEngine
from tests.support.http_server import FrontendProcess
from tests.support.text_model import write_text_model

TEXT = "The quick brown fox jumps over the lazy dog. Paris is the capital of France."
VISITS, CLIENTS = 40, 16
GROWTH_BYTES, PEAK_BYTES = 64 << 20, 1 << 30
"""What the process may keep once it is warm, and what it may hold for a while: ten bodies, and grammars being compiled."""
SPARE_FILES = 8
PATIENCE = {"header_seconds": 6.0, "body_seconds": 6.0, "write_seconds": 6.0}
"""Short, since visits wait for these limits; not so short that a client on a busy machine passes them."""
SETTINGS = {**PATIENCE, "grammar_seconds": 1.0, "max_request_bytes": 2**20}
CHECKED_JOURNAL = """
from ep_runtime.frontend.journal import Journal
def checked(inner):
    def method(self, *arguments):
        result = inner(self, *arguments)
        self.check_integrity()
        return result
    return method
for name in ("add", "record", "withdraw"):
    setattr(Journal, name, checked(getattr(Journal, name)))
"""
"""Runs in the frontend before it starts: its journal checks its own books after every change."""


class Front:
    """A frontend process and its engine. The engine writes TEXT for every request."""

    def __init__(self, folder: Path) -> None:
        model = write_text_model(folder / "model")
        tokenizer = Tokenizer.load(model)
        eos = tokenizer.eos_token_ids[0]
        script = [*tokenizer.encode(TEXT, False), eos]
        self.server = FrontendProcess(
            folder / "run", CHECKED_JOURNAL, model=str(model), served_model_name=["tiny"], max_queue=64, **SETTINGS
        )
        ready = {"eos": eos, "vocab_size": tokenizer.vocab_size, "max_loops": 4}
        self.engine = FakeEngine(folder / "run", 1, lambda submit: script, **ready).start()
        self.server.wait_line("out", "ready")
        self._process = psutil.Process(self.server.process.pid)
        self._lines = 0
        self.memory: list[int] = []
        self.files: list[int] = []
        self._warm()

    def _warm(self) -> None:
        """Largest prompts, several at once: the allocator keeps for each thread what the tokenizer once took for one."""
        largest = Visit("large", [request("/tokenize", dump({"prompt": "x-1 " * 260_000}))], strict=True)
        with ThreadPoolExecutor(4) as clients:
            for answer in [clients.submit(converse, self.server.url, largest) for _ in range(8)]:
                check_answer(largest, answer.result())
        self.memory.append(self._process.memory_info().rss)

    def case(self, rng: random.Random) -> None:
        """One batch of visits by several clients at once, garbage from the engine's side meanwhile, and a look at what is left."""
        visits = [visit(rng) for _ in range(VISITS)]
        garbage = [message_bytes(rng, ToFrontend) for _ in range(10)]
        with ThreadPoolExecutor(CLIENTS) as clients:
            running = [(number, made, clients.submit(converse, self.server.url, made)) for number, made in enumerate(visits)]
            for data in filter(is_broken, garbage):
                self.engine.send_raw(data)
            for number, made, answer in running:
                try:
                    check_answer(made, answer.result())
                except Exception as fault:
                    fault.add_note(f"visit {number} ({made.kind}, {made.end}): {b''.join(made.pieces)[:1500]!r}")
                    raise
        self._good_request()
        self._settle()

    def _good_request(self) -> None:
        made = Visit("good", [request(CHAT, dump(BODIES[CHAT][0]))], strict=True)
        answer = json.loads(converse(self.server.url, made).partition(b"\r\n\r\n")[2])
        assert answer["choices"][0]["message"]["content"] == TEXT

    def _metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.server.url}/metrics", timeout=BOUND_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name)

    def _settle(self) -> None:
        """Every sequence ended once: the journal is empty (and checked itself on the way), and so is the engine."""
        until = time.monotonic() + BOUND_SECONDS
        while self._metric("ep_journal_sequences") or self.engine.running:
            assert time.monotonic() < until, f"sequences are left; the engine runs {self.engine.running}"
            time.sleep(0.02)
        self.engine.clear()
        assert self.server.process.poll() is None, "the frontend died"
        news, self._lines = self.server.err[self._lines :], len(self.server.err)
        if any("Traceback" in line or "unexpected error" in line or "never retrieved" in line for line in news):
            raise Wrong("the frontend's log has an error:\n" + "\n".join(news[-200:]))
        self.memory.append(self._process.memory_info().rss)
        self.files.append(self._process.num_fds())

    def check_growth(self) -> None:
        """Memory and descriptors at the end are those after the first third."""
        warm = len(self.memory) // 3
        before, after = max(self.memory[: warm + 1]), statistics.median(self.memory[-max(3, warm // 2) :])
        assert after - before < GROWTH_BYTES, f"memory grew after warming up: {[m >> 20 for m in self.memory]} MiB"
        assert max(self.memory) < self.memory[0] + PEAK_BYTES, f"memory had a peak: {[m >> 20 for m in self.memory]} MiB"
        assert min(self.files[-3:]) <= max(self.files[: warm + 1]) + SPARE_FILES, f"descriptors: {self.files}"

    def close(self) -> None:
        """End both."""
        self.engine.stop(announce=False)
        self.server.close()


def is_broken(data: bytes) -> bool:
    """Whether the frontend must refuse these bytes: whole messages would be believed."""
    try:
        decode(ToFrontend, data)
    except EpFrameCorrupt:
        return True
    return False


@contextlib.contextmanager
def open_front() -> Iterator[Front]:
    """A Front in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="ep-"))
    try:
        front = Front(folder)
        try:
            yield front
        finally:
            front.close()
    finally:
        shutil.rmtree(folder)
