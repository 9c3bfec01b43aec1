"""A frontend without HTTP: to whoever connects it says its process's id. SIGTERM ends it.

FAKE_FRONTEND makes it end by itself with status 7: `dies`, or with `dies@N` its N-th process alone.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

from fake_engine import count_start, say


def main() -> int:
    number = count_start("frontend")
    say(f"fake frontend pid {os.getpid()} {' '.join(sys.argv[1:])}")
    if os.environ.get("FAKE_FRONTEND") in ("dies", f"dies@{number}"):
        return 7
    say("ready")
    config = json.loads(Path(sys.argv[2]).read_text())
    with socket.socket(fileno=config["listen_fd"]) as listener:
        while True:
            client, _ = listener.accept()
            with client:
                client.sendall(str(os.getpid()).encode())


def end(number: int, frame: object) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    raise SystemExit(main())
