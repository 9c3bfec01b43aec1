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
from tests.support.supervised import assert_gone


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DemoServer]:
    flags = getattr(request, "param", ())
    server = DemoServer(tmp_path, 2, "--max-model-len=512", "--num-blocks=128", "--drain-timeout=5", *flags)
    yield server
    server.close()


def everything(server: DemoServer) -> list[psutil.Process]:
    """All processes below torchrun at this moment."""
    return psutil.Process(server.torchrun.pid).children(recursive=True)


def end(server: DemoServer) -> None:
    """SIGTERM, as an operator sends it, and nothing is left."""
    processes = everything(server)
    server.torchrun.send_signal(signal.SIGTERM)
    server.torchrun.wait(END_SECONDS)
    assert_gone(processes)
    assert "ep-runtime failed" not in server.log()


def test_two_ranks_answer_in_english_and_end_in_order(server: DemoServer, capsys: pytest.CaptureFixture[str]) -> None:
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
    end(server)
    assert not [line for line in server.log().splitlines() if " WARNING " in line]


@pytest.mark.parametrize("server", [("--dtype=float32",)], indirect=True)
def test_a_killed_engine_loses_no_token_of_an_open_stream(server: DemoServer) -> None:
    """The client sees one answer, the one it would have had; a worker's engine dies under it, and then the head's."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    wanted = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 96, "temperature": 0}
    undisturbed = client.completions.create(**wanted, extra_body={"ignore_eos": True}).choices[0].text
    pieces: list[str] = []
    for number, chunk in enumerate(client.completions.create(**wanted, stream=True, extra_body={"ignore_eos": True})):
        pieces.append(chunk.choices[0].text)
        if number in (10, 50):
            server.engine({10: 1, 50: 0}[number]).kill()
    client.close()
    assert "".join(pieces) == undisturbed
    for rank in (0, 1):
        assert f"rank {rank}: its engine ended: killed by SIGKILL" in server.log()
    end(server)
