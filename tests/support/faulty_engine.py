"""The engine process with the armed faults of `chaos_engine`, and one more kind:

device    the next forward on this rank meets an error of its device
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ep_runtime.engine import main as engine
from ep_runtime.engine.executor import Executor
from protocol.commands import Forward
from protocol.frame import Frame
from tests.support.chaos_engine import Faults, arrange


class AcceleratorError(RuntimeError):
    """Bears the name of torch's, which the CPU never raises."""


def break_device(faults: Faults) -> None:
    """Have an armed rank's device fail."""
    execute = Executor.execute

    def faulty(self: Executor, frame: Frame, *args: Any, **kwargs: Any) -> None:
        if isinstance(frame.command, Forward) and faults.take("device") is not None:
            raise AcceleratorError("CUDA error: an illegal memory access was encountered")
        execute(self, frame, *args, **kwargs)

    Executor.execute = faulty  # type: ignore[method-assign]


if __name__ == "__main__":
    armed = Faults(Path(os.environ["CHAOS_DIR"]))
    arrange(armed)
    break_device(armed)
    sys.exit(engine.main())
