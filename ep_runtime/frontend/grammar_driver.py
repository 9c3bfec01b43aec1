"""Keeps one sequence's grammar in step with its tokens: masks are computed in a thread and sent as soon as they are known."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from typing import Protocol

from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.reasoning_gate import MaskSource
from ep_runtime.frontend.text.errors import GrammarError

log = logging.getLogger(__name__)


class MaskOwner(Protocol):
    """Whoever's sequences a grammar constrains."""

    def give_mask(self, request_id: str, index: int, mask: bytes) -> None:
        """Take the mask for generated token `index` of a sequence."""
        ...

    def fail(self, error: ApiError) -> None:
        """The output cannot be constrained."""
        ...


class GrammarDriver:
    """One sequence's grammar. The next token waits for its mask, so at most one step is in the thread at a time."""

    def __init__(self, source: MaskSource, pool: Executor) -> None:
        self._source = source
        self._pool = pool
        self._owner: MaskOwner | None = None
        self._request_id = ""
        self._task: asyncio.Task[None] | None = None

    def attach(self, owner: MaskOwner, request_id: str) -> None:
        """Say whose sequence this constrains."""
        self._owner, self._request_id = owner, request_id

    def advance(self, tokens: list[int], index: int) -> None:
        """Take the tokens before generated index `index` and send the mask for it."""
        self._task = asyncio.get_running_loop().create_task(self._advance(tokens, index))

    def close(self) -> None:
        """Nobody wants the mask any more."""
        if self._task is not None:
            self._task.cancel()

    async def _advance(self, tokens: list[int], index: int) -> None:
        assert self._owner is not None
        try:
            mask = await asyncio.get_running_loop().run_in_executor(self._pool, self._step, tokens)
        except GrammarError as error:
            # Limits of the library that only some outputs reach: the schema is at fault, and its sender can change it.
            self._owner.fail(ApiError(400, f"The grammar cannot be used: {error}", code="invalid_grammar"))
            return
        except Exception:
            log.exception("the grammar of %s failed", self._request_id)
            self._owner.fail(ApiError(500, "The grammar could not follow the output", code="grammar_error"))
            return
        self._owner.give_mask(self._request_id, index, mask)

    def _step(self, tokens: list[int]) -> bytes:
        for token in tokens:
            if not self._source.accept(token):
                raise ValueError(f"token {token} is outside the grammar's mask")
        return self._source.mask()
