"""The frontend as serve keeps it: real processes that end, come up or do not, and are told how things are."""

import json
import os
import signal
import socket

import pytest

from ep_runtime.config import RuntimeConfig
from ep_runtime.frontend.listening import listen_http
from ep_runtime.frontend.main import EXIT_CONFIG, refusal_line
from ep_runtime.settings import ConfigRefused
from ep_runtime.supervise import frontend as module
from ep_runtime.supervise.events import FrontendEnded
from ep_runtime.supervise.frontend import Frontend, frontend_config
from ep_runtime.supervise.loop import Loop
from ep_runtime.supervise.run import open_http
from protocol.messages import EpochEnded, Recovered

WAIT_SECONDS = 20.0
STAND_IN = """
import json, os, signal, socket, sys
import zmq
from protocol.codec import decode
from protocol.messages import ToFrontend
config = json.loads(open(sys.argv[sys.argv.index("--config-json") + 1]).read())
mode = open(os.environ["MODE_FILE"]).read()
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif mode != "serves":
    if mode == "2":
        print("a line before")
        print("refused: no such thing", flush=True)
        print("a part of one", end="", flush=True)
    sys.exit(int(mode))
inbox = zmq.Context().socket(zmq.PULL)
inbox.bind(f"ipc://{config['runtime_dir']}/frontend")
print("ready", flush=True)
print("pid", os.getpid(), flush=True)
listener = socket.socket(fileno=config["listen_fd"])
poller = zmq.Poller()
poller.register(inbox, zmq.POLLIN)
poller.register(listener, zmq.POLLIN)
while True:
    for what, _ in poller.poll():
        if what is inbox:
            message = decode(ToFrontend, inbox.recv())
            print("told", type(message).__name__, message.epoch, flush=True)
        else:
            client, _ = listener.accept()
            client.sendall(str(os.getpid()).encode())
            client.close()
"""


class Stand:
    """A frontend, the ends that it reported, and what its processes printed."""

    def __init__(self, loop: Loop, folder, capfd, monkeypatch) -> None:
        self.loop, self.capfd = loop, capfd
        self.text = ""
        self.ends: list[FrontendEnded] = []
        self.mode = folder / "mode"
        (folder / "stand_in.py").write_text(STAND_IN)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setenv("MODE_FILE", str(self.mode))
        runtime = folder / "r"
        runtime.mkdir()
        self.listener = listen_http("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        told = frontend_config(RuntimeConfig(command_timeout=7.0), folder, runtime, self.listener.fileno())
        self.config = json.loads(told.model_dump_json())
        self.frontend = Frontend(loop, "stand_in", told, self.listener, self.ends.append)

    def start(self, mode: str = "serves") -> None:
        self.mode.write_text(mode)
        self.frontend.start()

    def until(self, done, what: str) -> None:
        """Run the loop until `done()`."""
        looks = int(WAIT_SECONDS / 0.01)

        def look() -> None:
            nonlocal looks
            looks -= 1
            self.text += self.capfd.readouterr().out
            if done() or not looks:
                self.loop.stop()
            else:
                self.loop.later(0.01, look)

        self.loop.later(0.0, look)
        self.loop.run()
        assert done(), f"no {what} in {self.text}"

    def until_printed(self, text: str, count: int = 1) -> None:
        self.until(lambda: self.text.count(text) >= count, text)

    def pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.text.splitlines() if line.startswith("pid")]

    def until_ended(self, count: int) -> FrontendEnded:
        self.until(lambda: len(self.ends) >= count, "end")
        return self.ends[-1]


@pytest.fixture
def stand(tmp_path_factory, capfd, monkeypatch):
    with Loop() as loop:
        made = Stand(loop, tmp_path_factory.mktemp("f"), capfd, monkeypatch)
        yield made
        if made.frontend.alive:
            made.frontend.end(0.0)
            made.until_ended(len(made.ends) + 1)
        made.frontend.close()


def test_how_it_ended_and_whether_it_had_come_up(stand):
    assert EXIT_CONFIG == module.REFUSED_STATUS
    stand.start("7")
    assert stand.until_ended(1) == FrontendEnded("exit status 7")
    stand.start("2")
    assert stand.until_ended(2) == FrontendEnded("exit status 2: no such thing", refused=True)
    stand.until_printed("a line before\na part of one")
    assert "refused" not in stand.text
    assert f"{module.REFUSED_LINE.decode()}why; it is\n" == refusal_line("why\nit is")
    stand.start()
    stand.until_printed("pid")
    os.kill(stand.pids()[0], signal.SIGKILL)
    assert stand.until_ended(3) == FrontendEnded("killed by SIGKILL", ready=True)


def test_one_that_lived_long_had_come_up_though_it_did_not_say_so(stand, monkeypatch):
    monkeypatch.setattr(module, "STEADY_SECONDS", 0.0)
    stand.start("7")
    assert stand.until_ended(1) == FrontendEnded("exit status 7", ready=True)


def test_the_next_one_is_told_how_things_are(stand):
    stand.start()
    stand.frontend.tell(EpochEnded(epoch=3, reason="r", final=False))  # before it is there
    stand.until_printed("told EpochEnded 3")
    os.kill(stand.pids()[0], signal.SIGKILL)
    stand.until_ended(1)
    stand.start()
    stand.until_printed("told EpochEnded 3", 2)
    stand.frontend.tell(Recovered(epoch=4, seconds={}))
    stand.until_printed("told Recovered 4")
    os.kill(stand.pids()[1], signal.SIGKILL)
    stand.until_ended(2)
    stand.start()
    stand.until_printed("pid", 3)
    stand.frontend.tell(Recovered(epoch=9, seconds={}))
    stand.until_printed("told Recovered 9")
    assert stand.text.count("told EpochEnded 3") == 2
    assert stand.text.count("told Recovered 4") == 1


def test_a_frontend_that_reads_nothing_never_holds_up_who_tells_it_and_is_replaced(stand, monkeypatch):
    monkeypatch.setattr(module, "QUEUE_MESSAGES", 2)
    stand.start()
    stand.until_printed("pid")
    os.kill(stand.pids()[0], signal.SIGSTOP)
    for epoch in range(4000):
        stand.frontend.tell(EpochEnded(epoch=epoch, reason="x" * 10_000, final=False))
    assert stand.until_ended(1) == FrontendEnded("killed by SIGKILL", ready=True)
    stand.start()
    stand.until_printed("told EpochEnded 3999")


def test_clients_wait_while_it_is_started_again(stand):
    with socket.create_connection(("127.0.0.1", stand.port), timeout=WAIT_SECONDS) as client:
        stand.start("7")
        stand.until_ended(1)
        stand.start()
        stand.until_printed("pid")
        assert int(client.recv(100)) == stand.pids()[0]


def test_the_end_is_sigterm_then_sigkill_and_then_nobody_listens(stand):
    stand.start("deaf")
    stand.until_printed("pid")
    stand.frontend.end(0.05)
    assert stand.until_ended(1).how == "killed by SIGKILL"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", stand.port))


def test_what_it_is_told_of_its_place(stand):
    assert (stand.config["listen_fd"], stand.config["ready_bound_seconds"]) == (stand.listener.fileno(), 7.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "no such host"])
def test_an_address_that_cannot_be_had_is_refused_in_one_line(stand, host):
    with pytest.raises(ConfigRefused, match=f"host {host}, port {stand.port}: ") as refused:
        open_http(RuntimeConfig(host=host, port=stand.port))
    assert "\n" not in str(refused.value)
