"""The entry: `python -m ep_runtime.serve`, one process a rank when started by torchrun, a world of one otherwise.

Rank 0 supervises its engine and the frontend and coordinates; the other ranks supervise their engines and take their
configuration from rank 0. Nothing here imports torch or touches a device.
"""

from __future__ import annotations

import sys

from ep_runtime.supervise.guard import Shadowed, refuse_shadows


def main() -> int:
    """Serve until a signal or a failure; returns the exit status."""
    try:
        refuse_shadows()  # before anything imports a package that a file in the working directory could stand for
    except Shadowed as error:
        print(f"ep-runtime: {error}", file=sys.stderr)
        return 2
    from ep_runtime.supervise.run import serve

    return serve(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
