"""`python -m tests.soak [--minutes M] [--requests N] [--kill-every S] [--seed N] [--json PATH]`; status 1 when something grew."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.soak.soak import Settings, run_soak


def main() -> int:
    """Run once, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="A server under steady load: nothing may grow.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds between two kills of an engine; 0 for none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None, help="file for the whole outcome")
    flags = parser.parse_args()
    outcome = run_soak(Settings(60 * flags.minutes, flags.requests, flags.kill_every, flags.seed))
    print(outcome.text(), flush=True)
    if flags.json is not None:
        flags.json.write_text(json.dumps(outcome.data(), indent=1))
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
