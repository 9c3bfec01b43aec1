"""`python -m ep_runtime.bench NAME`: decode, prefill, throughput, serve, startup, collectives, scale, share, tune, control, cost,
plot, demo, recovery or vision.

The first three also run under torchrun, with any ranks; `collectives` runs under torchrun alone.
"""

from __future__ import annotations

import argparse
import logging

from ep_runtime.bench import (
    collectives,
    control,
    cost_doc,
    decode,
    demo,
    plots,
    prefill,
    recovery,
    scale,
    serve,
    share,
    startup,
    throughput,
    tune,
    vision,
)
from ep_runtime.bench.ending import end_what_was_started


def main(argv: list[str] | None = None) -> None:
    """Parse the flags and run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.bench", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    kinds = {
        "decode": (decode.__doc__, decode.add_arguments, decode.run),
        "prefill": (prefill.__doc__, prefill.add_arguments, prefill.run),
        "throughput": (throughput.__doc__, throughput.add_arguments, throughput.run),
        "serve": (serve.__doc__, serve.add_arguments, serve.run),
        "startup": (startup.__doc__, startup.add_arguments, startup.run),
        "collectives": (collectives.__doc__, collectives.add_arguments, collectives.run),
        "scale": (scale.__doc__, scale.add_arguments, scale.run),
        "share": (share.__doc__, share.add_arguments, share.run),
        "control": (control.__doc__, control.add_arguments, control.run),
        "cost": (cost_doc.__doc__, cost_doc.add_arguments, cost_doc.run),
        "plot": ("draw a result that was written before", plots.add_arguments, plots.run),
        "demo": (demo.__doc__, demo.add_arguments, demo.run),
        "recovery": (recovery.__doc__, recovery.add_arguments, recovery.run),
        "tune": (tune.__doc__, tune.add_arguments, tune.run),
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
    end_what_was_started()
    main()
