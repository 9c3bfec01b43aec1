"""The whole server as a user starts it: torchrun, two ranks, the demo model, the official client."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import openai
import psutil
import pytest

from ep_runtime.demo.client import QUESTION, ask
from ep_runtime.demo.run import wait_ready

WAIT_SECONDS = 60.0


class Server:
    """torchrun and everything below it."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.log_path = folder / "log"
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ep_runtime.serve", "--device=cpu"]
        command += [f"--port={self.port}", "--max-model-len=512", "--num-blocks=128", "--drain-timeout=5"]
        with self.log_path.open("wb") as log:
            self.torchrun = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def ready(self) -> None:
        wait_ready(self.torchrun, f"http://127.0.0.1:{self.port}/ready")

    def log(self) -> str:
        return self.log_path.read_text()

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.torchrun.pid).children(recursive=True)

    def engine(self, rank: int) -> psutil.Process:
        """The engine under the serve process of this rank."""
        for process in self.processes():
            if "ep_runtime.engine.main" in process.cmdline() and process.parent().environ()["RANK"] == str(rank):
                return process
        raise AssertionError(f"no engine of rank {rank}")

    def close(self) -> None:
        if self.torchrun.poll() is None:
            self.torchrun.terminate()
        self.torchrun.wait(WAIT_SECONDS)


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    try:
        server.ready()
        yield server
    finally:
        server.close()


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=WAIT_SECONDS)
    assert alive == []


def test_two_ranks_answer_in_english_and_end_in_order(server, capsys):
    processes = server.processes()
    assert sum("ep_runtime.engine.main" in process.cmdline() for process in processes) == 2
    answer = ask(f"http://127.0.0.1:{server.port}/v1", QUESTION)
    assert answer.strip() == "The capital of France is Paris."
    assert answer in capsys.readouterr().out
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 32}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as response:
        assert json.load(response)["choices"][0]["message"]["content"] == answer
    server.torchrun.send_signal(signal.SIGTERM)
    server.torchrun.wait(WAIT_SECONDS)
    assert_gone(processes)
    assert "ep-runtime failed" not in server.log()


def test_a_killed_engine_ends_the_server_and_the_open_request_and_is_named(server):
    processes = server.processes()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
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
    assert server.torchrun.wait(WAIT_SECONDS) != 0
    assert "ep-runtime failed: rank 1: its engine ended: killed by SIGKILL" in server.log()
    assert_gone(processes)
