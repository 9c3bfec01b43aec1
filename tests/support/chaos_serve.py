"""`serve` with engines that a test can break: `python -P -m tests.support.chaos_serve FLAGS`."""

import sys

from ep_runtime.supervise.run import Modules, serve

if __name__ == "__main__":
    raise SystemExit(serve(sys.argv[1:], Modules(engine="tests.support.chaos_engine")))
