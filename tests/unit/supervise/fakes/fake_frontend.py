"""A frontend without HTTP: it waits for SIGTERM, or ends by itself when FAKE_FRONTEND says so."""

import os
import signal
import sys


def main() -> int:
    print(f"fake frontend pid {os.getpid()} {' '.join(sys.argv[1:])}", flush=True)
    if os.environ.get("FAKE_FRONTEND") == "dies":
        return 7
    signal.sigwait({signal.SIGTERM})
    return 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    raise SystemExit(main())
