"""serve, or with --head the worker daemon, with the fake children."""

import sys

from ep_runtime.supervise.run import Modules, serve, work

if __name__ == "__main__":
    modules = Modules(engine="fake_engine", frontend="fake_frontend")
    if sys.argv[1] == "--head":
        raise SystemExit(work(sys.argv[2], None, 0, modules))
    raise SystemExit(serve(sys.argv[1:], modules))
