"""What tests on a GPU share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nothing_may_synchronise() -> Iterator[None]:
    """Raise on a call that waits for the device. torch warns, on entering, that the mode is a prototype."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
