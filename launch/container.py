"""Entry of the container image: `[torchrun flags] [-- serve flags]` becomes one torchrun of `ep_runtime.serve`.

It replaces its own process, so that the signals of `docker stop` reach torchrun itself.
"""

from __future__ import annotations

import os
import sys


def command(arguments: list[str]) -> list[str]:
    """The torchrun command line for the container's arguments."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    torchrun, serve = arguments[:split], arguments[split + 1 :]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *torchrun, "-m", "ep_runtime.serve", *serve]


if __name__ == "__main__":
    line = command(sys.argv[1:])
    os.execv(line[0], line)
