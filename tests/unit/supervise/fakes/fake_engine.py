"""An engine without a model: it speaks the control protocol, and misbehaves where FAKE_ENGINE_<rank> says so.

The variable holds orders `MOMENT ACT`, separated by commas: `load hangs`, `forming dies@2`. With `@N` an order is for the rank's
N-th process alone; they are counted by files in FAKE_STARTS. Moments: load, opening, forming (told to begin), running (ready),
leaving (told EndEpoch), stopping (told to stop). Acts:

    dies     by SIGKILL              crashes  by SIGSEGV            exits  with status 0
    fails    with a report           reports  once, and lives on   hangs  for ever
    is deaf  hangs, SIGTERM ignored from the start on
"""

import argparse
import os
import resource
import signal
import socket
import time
from pathlib import Path

from protocol.errors import EpPeerGone
from protocol.message_socket import MessageSocket
from protocol.messages import (
    BeginEpoch,
    EndEpoch,
    EpochLeft,
    EpochOpened,
    Loaded,
    OpenEpoch,
    Ready,
    Report,
    Stop,
    ToEngineControl,
    Welcome,
)
from protocol.progress import Phase, ProgressPage


class Engine:
    def __init__(self) -> None:
        self.reported = False
        parser = argparse.ArgumentParser()
        parser.add_argument("--control-fd", type=int)
        parser.add_argument("--progress-fd", type=int)
        parser.add_argument("--runtime-dir", type=Path)
        parser.add_argument("--device-index", type=int)
        parser.add_argument("--local-ranks", type=int)
        self.flags = parser.parse_args()
        self.page = ProgressPage.open(self.flags.progress_fd)
        self.control = MessageSocket(socket.socket(fileno=self.flags.control_fd), ToEngineControl)
        self.rank = -1
        self.epoch = 0
        self.orders: dict[str, str] = {}

    def run(self) -> int:
        self.page.enter(Phase.STANDBY)
        say(f"fake process {os.getpid()} waits")
        welcome = self.control.recv()
        assert isinstance(welcome, Welcome)
        self.rank = welcome.rank
        self.orders = read_orders(self.rank, count_start(self.rank))
        if "is deaf" in self.orders.values():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # before SIGTERM can come
        self.page.enter(Phase.LOADING)
        say(f"fake engine {self.rank} pid {os.getpid()} device {self.flags.device_index}")
        self.moment("load")
        self.page.enter(Phase.IDLE)
        self.control.send(Loaded(rank=self.rank))
        while True:
            try:
                message = self.control.recv()
            except EpPeerGone:
                return 3
            if isinstance(message, Stop):
                self.moment("stopping")
                return 0
            self.take(message)

    def take(self, message: object) -> None:
        match message:
            case OpenEpoch():
                self.moment("opening")
                for name in ("links", "engine"):
                    (self.flags.runtime_dir / f"{name}-{message.epoch}").touch()
                self.control.send(EpochOpened(epoch=message.epoch, store="s:1", links="l:1"))
            case BeginEpoch():
                self.epoch = message.epoch
                self.page.begin_epoch(message.epoch)
                self.moment("forming")
                self.page.begin_command(7, 0)
                self.page.set_alone(os.environ.get("FAKE_ALONE", ""))
                self.page.enter(Phase.WAITING)
                self.control.send(Ready(epoch=message.epoch, rank=self.rank))
                self.moment("running")
            case EndEpoch():
                say(f"fake engine {self.rank} leaves epoch {message.epoch}")
                self.page.enter(Phase.LEAVING)
                self.moment("leaving")
                for name in ("links", "engine"):
                    if self.rank == 0:
                        (self.flags.runtime_dir / f"{name}-{message.epoch}").unlink(missing_ok=True)
                self.page.enter(Phase.IDLE)
                self.control.send(EpochLeft(epoch=message.epoch, rank=self.rank))
            case _:
                raise AssertionError(message)

    def moment(self, name: str) -> None:
        act = self.orders.get(name)
        if act is None:
            return
        say(f"fake engine {self.rank} {act} in {name}, pid {os.getpid()}")
        match act:
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "crashes":
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exits":
                raise SystemExit(0)
            case "reports" if self.reported:
                pass  # it lives on: reporting in every epoch, it would do so while the server stops, too
            case "fails" | "reports":
                self.reported = True
                self.control.send(Report(rank=self.rank, epoch=self.epoch, error="RuntimeError", message="the device is on fire"))
                if act == "fails":
                    raise SystemExit(1)
            case "hangs" | "is deaf":
                time.sleep(600)
            case _:
                raise AssertionError(act)


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # one write: lines of several processes do not mix


def count_start(who: object) -> int:
    folder, number = Path(os.environ["FAKE_STARTS"]), 1
    while True:
        try:
            (folder / f"{who}-{number}").touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return number


def read_orders(rank: int, start: int) -> dict[str, str]:
    orders = {}
    for order in filter(None, os.environ.get(f"FAKE_ENGINE_{rank}", "").split(",")):
        words, _, only = order.strip().partition("@")
        moment, _, act = words.partition(" ")
        if not only or int(only) == start:
            orders[moment] = act
    return orders


if __name__ == "__main__":
    raise SystemExit(Engine().run())
