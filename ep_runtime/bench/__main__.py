"""`python -m ep_runtime.bench decode|prefill|throughput|collectives|demo|recovery|vision`.

The first three also run under torchrun, with any ranks; `collectives` runs under torchrun alone.
"""

from __future__ import annotations

import argparse
import logging

from ep_runtime.bench import collectives, decode, demo, prefill, recovery, vision


def main(argv: list[str] | None = None) -> None:
    """Parse the flags and run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.bench", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    kinds = {
        "decode": (decode.__doc__, decode.add_arguments, decode.run),
        "prefill": ("tokens per second of prompts", prefill.add_prefill_arguments, prefill.run_prefill),
        "throughput": ("seconds of many requests at once", prefill.add_throughput_arguments, prefill.run_throughput),
        "collectives": (collectives.__doc__, collectives.add_arguments, collectives.run),
        "demo": (demo.__doc__, demo.add_arguments, demo.run),
        "recovery": (recovery.__doc__, recovery.add_arguments, recovery.run),
        "vision": (vision.__doc__, vision.add_arguments, vision.run),
    }
    for name, (text, add_arguments, run) in kinds.items():
        command = commands.add_parser(name, help=text, description=text)
        add_arguments(command)
        command.set_defaults(run=run)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    options.run(options)


if __name__ == "__main__":
    main()
