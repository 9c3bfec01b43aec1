"""`python -m ep_runtime.worker --head HOST:PORT`: one rank's worker daemon, started without torchrun on any host.

It takes no model flags: the head sends the whole configuration. It waits for the head for as long as that takes, also when the head
goes away and comes back, and ends when the head says so, or by a signal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ep_runtime.supervise.guard import Shadowed, refuse_shadows


def main() -> int:
    """Join the head and run one engine for it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.worker", description=main.__doc__)
    parser.add_argument("--head", required=True, type=address, metavar="HOST:PORT", help="where the head takes ranks")
    parser.add_argument("--token-file", type=Path, help="file that holds the head's token (else the variable EP_RUNTIME_TOKEN)")
    parser.add_argument("--device-index", type=index, default=0, help="GPU of this worker on its host")
    flags = parser.parse_args()
    try:
        refuse_shadows()
    except Shadowed as error:
        print(f"ep-runtime: {error}", file=sys.stderr)
        return 2
    from ep_runtime.supervise.run import work

    return work(flags.head, flags.token_file, flags.device_index)


def address(text: str) -> str:
    """`HOST:PORT`, or a word of what is wrong with it."""
    host, colon, port = text.rpartition(":")
    if not host or not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT with a port from 1 to 65535")
    return text


def index(text: str) -> int:
    """A number from 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
