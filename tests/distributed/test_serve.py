"""The whole server as a user starts it: torchrun, two ranks, the demo model, the official client."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from ep_runtime.demo.client import QUESTION, ask
from tests.support.demo_server import END_SECONDS, DemoServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DemoServer]:
    server = DemoServer(tmp_path, 2, "--max-model-len=512", "--num-blocks=128", "--drain-timeout=5")
    yield server
    server.close()


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=END_SECONDS)
    assert alive == []


def test_two_ranks_answer_in_english_and_end_in_order(server: DemoServer, capsys: pytest.CaptureFixture[str]) -> None:
    processes = server.processes
    assert sum("ep_runtime.engine.main" in process.cmdline() for process in processes) == 2
    answer = ask(f"{server.url}/v1", QUESTION)
    assert answer.strip() == "The capital of France is Paris."
    assert answer in capsys.readouterr().out
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 32}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=END_SECONDS) as response:
        assert json.load(response)["choices"][0]["message"]["content"] == answer
    server.torchrun.send_signal(signal.SIGTERM)
    server.torchrun.wait(END_SECONDS)
    assert_gone(processes)
    assert "ep-runtime failed" not in server.log()


def test_a_killed_engine_ends_the_server_and_the_open_request_and_is_named(server: DemoServer) -> None:
    processes = server.processes
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model="demo", prompt="Once upon a time", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    received = iter(stream)
    next(received)
    server.engine(1).kill()
    with pytest.raises(openai.APIError):
        for _ in received:
            pass
    client.close()
    assert server.torchrun.wait(END_SECONDS) != 0
    assert "ep-runtime failed: rank 1: its engine ended: killed by SIGKILL" in server.log()
    assert_gone(processes)
