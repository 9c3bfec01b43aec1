"""Compiling grammars under a time limit. The library cannot be interrupted, so what is late is left to its thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.text.errors import GrammarError
from ep_runtime.frontend.text.grammar import Grammar, GrammarFactory

AT_ONCE = 2
MAX_LATE = 4
"""Compilations that may go on after their time; while there are as many, no other begins."""


class GrammarCompiler:
    """At most AT_ONCE requests compile at a time; the others wait for their turn before their time begins."""

    def __init__(self, factory: GrammarFactory | None, *, seconds: float, max_bytes: int) -> None:
        self._factory = factory
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._pool = ThreadPoolExecutor(AT_ONCE + MAX_LATE, thread_name_prefix="grammar")
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._late: set[Future[Grammar]] = set()

    async def compile(self, make: Callable[[GrammarFactory], Grammar], schema: Any, param: str) -> Grammar:
        """What `make` makes of `schema`. Raises ApiError: 400 for what cannot be used or is late, 503 when too much is late."""
        factory = self._factory
        if factory is None:
            raise ApiError(400, "The tokenizer has no end token, so no output can be constrained", param=param)
        size = len(json.dumps(schema))
        if size > self._max_bytes:
            raise ApiError(400, f"The schema has {size} bytes; the server takes {self._max_bytes}", param=param)
        async with self._turn:
            self._late = {future for future in self._late if not future.done()}
            if len(self._late) >= MAX_LATE:
                raise ApiError(503, "Too many grammars are still being compiled", param=param, code="grammar_busy", retry_after=5)
            future = self._pool.submit(make, factory)
            try:
                async with asyncio.timeout(self._seconds):
                    return await asyncio.wrap_future(future)
            except TimeoutError:
                raise ApiError(400, f"The grammar took longer than {self._seconds:g} s to compile", param=param) from None
            except (GrammarError, RecursionError) as error:
                raise ApiError(400, f"The grammar cannot be used: {error}", param=param, code="invalid_grammar") from None
            finally:
                if not future.done():
                    self._late.add(future)

    def close(self) -> None:
        """Take nothing more; what runs is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
