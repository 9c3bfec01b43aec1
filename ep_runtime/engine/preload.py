"""Imports what an engine will need, before it is told what that is: a standby has everything in memory but its rank's weights."""

from __future__ import annotations

import importlib
from pathlib import Path

MODULES = ("multiprocessing.synchronize", "numpy.ma", "psutil")
"""What libraries import late, beyond what `ep_runtime.engine.main` imports by itself."""

GPU_MODULES = (
    "triton",
    "kernels.peer_sums",
    "kernels.peer_gather_triton",
    "kernels.tuning",
    "model.layers.fused",
    "ep_runtime.engine.peers",
)


def preload(devices: Path = Path("/dev")) -> None:
    """Import, and touch no device: whether there is a GPU is told by its node among `devices`."""
    for name in (*MODULES, *(GPU_MODULES if any(devices.glob("nvidia[0-9]*")) else ())):
        importlib.import_module(name)
