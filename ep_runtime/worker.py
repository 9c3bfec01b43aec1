"""`python -m ep_runtime.worker --head HOST:PORT`: one rank's worker daemon, started without torchrun on any host.

It takes no model flags: the head sends the whole configuration.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ep_runtime.supervise.guard import Shadowed, refuse_shadows


def main() -> int:
    """Join the head and run one engine for it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.worker", description=main.__doc__)
    parser.add_argument("--head", required=True, metavar="HOST:PORT", help="where the head takes ranks")
    parser.add_argument("--token-file", type=Path, help="file that holds the head's token (else the variable EP_RUNTIME_TOKEN)")
    parser.add_argument("--device-index", type=int, default=0, help="GPU of this worker on its host")
    parser.add_argument("--join-timeout", type=float, default=300.0, help="seconds to wait for the head to listen")
    flags = parser.parse_args()
    try:
        refuse_shadows()
    except Shadowed as error:
        print(f"ep-runtime: {error}", file=sys.stderr)
        return 2
    from ep_runtime.supervise.run import work

    return work(flags.head, flags.token_file, flags.device_index, flags.join_timeout)


if __name__ == "__main__":
    raise SystemExit(main())
