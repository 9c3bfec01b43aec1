"""An engine without a model: it speaks the control protocol, and misbehaves as its rank's FAKE_ENGINE_<rank> says."""

import argparse
import os
import signal
import socket
import time

from protocol.errors import EpPeerGone
from protocol.message_socket import MessageSocket
from protocol.messages import BeginEpoch, EpochOpened, Loaded, OpenEpoch, Ready, Report, Stop, ToEngineControl, Welcome


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int)
    parser.add_argument("--runtime-dir")
    parser.add_argument("--device-index", type=int)
    parser.add_argument("--local-ranks", type=int)
    flags = parser.parse_args()
    control = MessageSocket(socket.socket(fileno=flags.control_fd), ToEngineControl)
    welcome = control.recv()
    assert isinstance(welcome, Welcome)
    mode = os.environ.get(f"FAKE_ENGINE_{welcome.rank}", "")
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"fake engine {welcome.rank} pid {os.getpid()} device {flags.device_index}", flush=True)
    if mode == "load hangs":
        time.sleep(600)
    control.send(Loaded(rank=welcome.rank))
    while True:
        try:
            message = control.recv()
        except EpPeerGone:
            return 3
        match message:
            case OpenEpoch():
                control.send(EpochOpened(epoch=message.epoch, store="s:1", links="l:1"))
            case BeginEpoch():
                if mode == "reports":
                    control.send(
                        Report(rank=welcome.rank, epoch=message.epoch, error="RuntimeError", message="the device is on fire")
                    )
                    return 1
                control.send(Ready(epoch=message.epoch, rank=welcome.rank))
                if mode == "leaves":
                    return 0
            case Stop():
                if mode == "deaf":
                    time.sleep(600)
                return 0


if __name__ == "__main__":
    raise SystemExit(main())
