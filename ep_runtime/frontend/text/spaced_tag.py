"""A tag after white space, in a stream."""

from __future__ import annotations


class SpacedTag:
    """Decides what a stream goes on with: `tag`, after white space at most, or something else.

    Each character is looked at once, however much white space comes: it is kept in pieces, and only what may be the tag's start is
    compared again (fewer characters than the tag has).
    """

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._space: list[str] = []
        self._start = ""
        self.found = False
        """True once the tag has come."""

    @property
    def raw(self) -> str:
        """All that was taken, while nothing is decided."""
        return "".join(self._space) + self._start

    def push(self, text: str) -> str | None:
        """Takes text; None while nothing is decided, then what follows the tag, or all that was taken if it is another thing."""
        if not self._start:
            start = text.lstrip()
            self._space.append(text[: len(text) - len(start)])
            text = start
        self._start += text
        if self._start.startswith(self._tag):
            self.found = True
            return self._start[len(self._tag) :]
        return None if self._tag.startswith(self._start) else self.raw
