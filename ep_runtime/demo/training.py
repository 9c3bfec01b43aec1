"""What the trainings of the demos' models share: a process of their own, a rate, and what they print. No torch."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ep_runtime.demo.checkpoint import DemoUnavailable, built_once, cache_root

WARM_UP = 20
REPORT_EVERY = 50


class TrainingFailed(Exception):
    """The loss stayed above the target; the message has both."""


def trained_once(name: str, version: int, train: Callable[[Path], None], root: Path | None) -> Path:
    """The folder of a demo's model, which `train` fills on first use; it appears whole or not at all."""
    return built_once((root or cache_root()) / f"demo-{name}-{version}", train)


def train_apart(name: str, folder: Path) -> None:
    """Run `ep_runtime.demo.NAME_training FOLDER` to its end. Raises `DemoUnavailable` when it fails."""
    command = [sys.executable, "-P", "-m", f"ep_runtime.demo.{name}_training", str(folder)]
    status = subprocess.run(command, stdin=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode
    if status != 0:
        raise DemoUnavailable(f"training the {name} demo's model ended with status {status}")


def rate_at(step: int, steps: int) -> float:
    """The share of the highest learning rate: it rises over `WARM_UP` steps and falls along a cosine to 0."""
    return min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2


class Progress:
    """Prints the mean loss of each `REPORT_EVERY` steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.seen: list[float] = []

    def add(self, loss: float) -> None:
        """The loss of the next step."""
        self.seen.append(loss)
        if len(self.seen) % REPORT_EVERY == 0:
            mean = sum(self.seen[-REPORT_EVERY:]) / REPORT_EVERY
            print(f"  step {len(self.seen)} of {self._steps}: loss {mean:.4f}", flush=True)


def run_training(name: str, description: str | None, train: Callable[[Path], None]) -> int:
    """The command line of a training: fill the folder that is named; status 1, with the reason, when the target was missed."""
    parser = argparse.ArgumentParser(prog=f"python -m ep_runtime.demo.{name}_training", description=description)
    parser.add_argument("folder", type=Path)
    flags = parser.parse_args()
    try:
        train(flags.folder)
    except TrainingFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0
