"""Calls that block in C++ without looking at the epoch, made endable."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from protocol.channel import SLICE_MS

_Result = TypeVar("_Result")


def endable(call: Callable[[], _Result], check: Callable[[], None], name: str) -> _Result:
    """What `call` returns or raises. It runs in a thread, and `check`, which may raise, is called every 20 ms meanwhile.

    A call that `check` cuts short goes on in its thread, and its result is dropped: it must end by itself, by a timeout or by the
    end of its peers' connections.
    """
    returned: list[_Result] = []
    raised: list[Exception] = []
    ended = threading.Event()

    def run() -> None:
        try:
            returned.append(call())
        except Exception as error:
            # With its traceback it would hold this frame, which holds it.
            raised.append(error.with_traceback(None))
        finally:
            ended.set()

    threading.Thread(target=run, name=name, daemon=True).start()
    while not ended.wait(SLICE_MS / 1000):
        check()
    if raised:
        raise raised.pop()
    return returned.pop()
