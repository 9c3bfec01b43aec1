"""`python -m tests.fuzz wire|http [--minutes M] [--seed S] [--case NAME:NUMBER]`; status 1 when something was found."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import traceback

from tests.fuzz.loop import Plan
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Run one target for its time, or one case of a part of it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Random input for everything that reads from outside."
    )
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="a random one when absent; it is printed")
    parser.add_argument("--case", default=None, metavar="NAME:NUMBER", help="run this one case of a seed alone")
    flags = parser.parse_args()
    logging.disable(logging.CRITICAL)  # every refusal is logged
    seed = secrets.randbelow(2**32) if flags.seed is None else flags.seed
    only, _, number = (flags.case or "").partition(":")
    plan = Plan(seed, 60 * flags.minutes, int(number or 0), 1 if flags.case else None)
    parts = TARGETS[flags.target]
    if only and only not in parts:
        return 0  # a part of the other target
    print(f"{flags.target}: seed {seed}", flush=True)
    try:
        for name, (share, run) in parts.items():
            if only in ("", name):
                run(plan.share(share))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
