"""The demos from end to end: build the checkpoint, serve it over two ranks with torchrun, ask, and stay up."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import openai

from ep_runtime.demo.checkpoint import DemoUnavailable, demo_checkpoint
from ep_runtime.demo.client import QUESTION, WrongAnswer, ask
from ep_runtime.demo.server import DemoFailed, end, wait_ready
from ep_runtime.demo.trellis_checkpoint import trellis_checkpoint
from ep_runtime.demo.trellis_client import quiz
from ep_runtime.demo.vision_checkpoint import vision_checkpoint
from ep_runtime.demo.vision_client import show_and_ask
from ep_runtime.demo.vision_text import ONE


@dataclass(frozen=True, slots=True)
class Demo:
    """A model to show: its folder, how that is made, and the questions to the server at a base URL (True when answered)."""

    checkpoint: Callable[[], Path]
    made: str
    ask: Callable[[str], bool]
    more: str
    """Arguments of the client that asks more."""
    named: bool
    """The server must be told the folder: it is not the one that it serves by default."""


def ask_in_text(base_url: str) -> bool:
    """The text demo's question."""
    print(f"\nQuestion: {QUESTION}\nAnswer:   ", end="", flush=True)
    return bool(ask(base_url, QUESTION).strip())


def ask_about_pictures(base_url: str) -> bool:
    """The vision demo's questions; raises `WrongAnswer`."""
    show_and_ask(base_url)
    return True


def ask_for_complements(base_url: str) -> bool:
    """The Trellis demo's questions; raises `WrongAnswer`."""
    quiz(base_url)
    return True


DEMOS = {
    "text": Demo(demo_checkpoint, "built", ask_in_text, "'QUESTION'", named=False),
    "trellis": Demo(trellis_checkpoint, "trained for a minute or two", ask_for_complements, "47921", named=True),
    "vision": Demo(vision_checkpoint, "trained for a minute or two", ask_about_pictures, f"--picture FILE '{ONE}'", named=True),
}
"""By the name that `--model` takes."""


def main() -> int:
    """`python -m ep_runtime.demo.run [--model text|trellis|vision] [--oneshot]`; exit status 0 when all was answered and ended."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.demo.run", description=__doc__)
    parser.add_argument(
        "--model",
        choices=sorted(DEMOS),
        default="text",
        help="trellis: a looped model, vision: one that looks at pictures; both are trained on the first run",
    )
    parser.add_argument("--oneshot", action="store_true", help="end after the answer instead of staying up")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--ranks", type=int, default=2)
    flags = parser.parse_args()
    # SIGTERM ends the demo as Ctrl-C does: the server runs in a session of its own and would outlive it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return show(DEMOS[flags.model], flags.port, flags.ranks, flags.oneshot)
    except (DemoUnavailable, DemoFailed, WrongAnswer, openai.APIError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1


def show(demo: Demo, port: int, ranks: int, oneshot: bool) -> int:
    """Build, serve, ask, and stay or end; the exit status."""
    print(f"Demo checkpoint ({demo.made} on the first run) ...", flush=True)
    folder = demo.checkpoint()
    print(f"  {folder}", flush=True)
    arguments = ["--nproc-per-node", str(ranks), "-m", "ep_runtime.serve", "--device", "cpu", "--port", str(port)]
    arguments += ["--model", str(folder)] if demo.named else []
    print(f"$ torchrun {' '.join(arguments)}", flush=True)
    server = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_ready(server, f"http://127.0.0.1:{port}/ready")
        answered = demo.ask(f"http://127.0.0.1:{port}/v1")
        if not oneshot:
            print(f"\nServing on http://127.0.0.1:{port}/v1 until Ctrl-C. Ask more, in another terminal:", flush=True)
            print(f"{sys.executable} -m ep_runtime.demo.client --base-url http://127.0.0.1:{port}/v1 {demo.more}", flush=True)
            raise DemoFailed(f"the server ended with status {server.wait()}")
    except KeyboardInterrupt:
        answered = True
    except BaseException:
        end(server)
        raise
    status = end(server)
    if status != 0:
        raise DemoFailed(f"the server ended with status {status}")
    return 0 if answered else 1


if __name__ == "__main__":
    raise SystemExit(main())
