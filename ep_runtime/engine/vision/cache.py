"""Rows of encoded images on the head, by contents: encoded once for all requests that show them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class EncodedImages:
    """Rows `[n, row_width]` by digest, bounded in bytes: the one whose use is longest ago goes first.

    A container of digests, for `Scheduler.plan`. `limit_bytes` have room for the images of one prompt at least, and an entry is
    never larger than them.
    """

    def __init__(self, limit_bytes: int, row_bytes: int) -> None:
        self.capacity_rows = limit_bytes // row_bytes
        self._row_bytes = row_bytes
        self._held = 0
        self._rows: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def __contains__(self, digest: object) -> bool:
        return digest in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def held_rows(self) -> int:
        """Rows of all entries."""
        return self._held

    def rows(self, digest: bytes) -> torch.Tensor:
        """The rows of an image that is here; a use of it."""
        self._rows.move_to_end(digest)
        return self._rows[digest]

    def keep(self, digests: Iterable[bytes]) -> None:
        """These are needed soon, the first of them soonest: those of them that are here go last."""
        for digest in reversed([*digests]):
            if digest in self._rows:
                self._rows.move_to_end(digest)

    def put(self, digest: bytes, rows: torch.Tensor) -> None:
        """Add an image; `rows` share their memory with nothing. ValueError for one that does not fit, or of another width."""
        count, size = rows.shape[0], rows.nbytes
        if count > self.capacity_rows or size != count * self._row_bytes:
            raise ValueError(f"{count} rows of {size} B; {self.capacity_rows} of {self._row_bytes} B fit")
        known = self._rows.pop(digest, None)
        self._held -= 0 if known is None else known.shape[0]
        while self._held + count > self.capacity_rows:
            self._held -= self._rows.popitem(last=False)[1].shape[0]
        self._rows[digest] = rows
        self._held += count

    def clear(self) -> None:
        """Let go of everything."""
        self._rows.clear()
        self._held = 0

    def check_integrity(self) -> None:
        """ValueError unless the entries are those that are counted, within the limit, and share no memory."""
        held = sum(rows.shape[0] for rows in self._rows.values())
        if held != self._held or held > self.capacity_rows:
            raise ValueError(f"encoded images have {held} rows, books say {self._held} of {self.capacity_rows}")
        if any(rows.untyped_storage().nbytes() != rows.shape[0] * self._row_bytes for rows in self._rows.values()):
            raise ValueError("an encoded image is not alone in its memory")
