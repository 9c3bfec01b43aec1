"""The bound on decoded images that requests hold, from decoding until their last sequence has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ep_runtime.frontend.api.errors import ApiError


class Hold:
    """What one request holds while its prompt is being prepared; the journal counts it afterwards.

    Everything counts once for each of its `samples`: on the way to the engine each of them has a copy.
    """

    def __init__(self, memory: ImageMemory, samples: int) -> None:
        self._memory = memory
        self._samples = samples
        self.size = 0

    def take(self, size: int) -> None:
        """Count `size` more bytes. Raises ApiError 429, or 400 when the request alone is over the bound."""
        bound, size = self._memory.bound, self._samples * size
        if self.size + size > bound:
            times = f", {self._samples} times" if self._samples > 1 else ""
            raise ApiError(400, f"The request's images have more than {bound} bytes when decoded{times}", code="images_too_large")
        if self._memory.held + size > bound:
            raise ApiError(429, "The images of unfinished requests fill the server", code="queue_full", retry_after=1)
        self.size += size
        self._memory.preparing += size


class ImageMemory:
    """Bytes of pixels over all requests. `journaled` tells what the journal has of them."""

    def __init__(self, bound: int, journaled: Callable[[], int]) -> None:
        self.bound = bound
        self.preparing = 0
        self._journaled = journaled

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return self.preparing + self._journaled()

    @contextlib.contextmanager
    def holding(self, samples: int = 1) -> Iterator[Hold]:
        """Count a request's images until the block ends: whoever then journals them without a pause finds the room free."""
        hold = Hold(self, samples)
        try:
            yield hold
        finally:
            self.preparing -= hold.size
