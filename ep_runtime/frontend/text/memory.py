"""Memory that freed objects leave with the C library's allocator."""

from __future__ import annotations

import ctypes


def give_memory_back() -> None:
    """Return the allocator's free pages, of all threads, to the system; nothing where the C library has no such call.

    glibc keeps what a thread has freed for as long as the thread lives. Other Python threads run meanwhile.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
