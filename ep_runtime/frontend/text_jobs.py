"""Threads for work on texts: long ones one at a time and apart from the others, and with their memory given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ep_runtime.frontend.text.memory import give_memory_back

T = TypeVar("T")
LONG = 2**16
"""Bytes, or tokens, from which on a text is long. A tokenizer takes 100 to 350 times a text's size while it works (measured)."""


class TextJobs:
    """Two threads for short texts, and one for long ones: their memory does not add up, and short texts do not wait for them."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-text")

    async def run(self, work: Callable[[], T], size: int = 0) -> T:
        """What `work` returns, for a text of `size` bytes or tokens."""
        loop = asyncio.get_running_loop()
        if size < LONG:
            return await loop.run_in_executor(self._short, work)
        return await loop.run_in_executor(self._long, _and_give_back, work)

    def close(self) -> None:
        """Let the threads end; what they compute is not waited for."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


def _and_give_back(work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        give_memory_back()
