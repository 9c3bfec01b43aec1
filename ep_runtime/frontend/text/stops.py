"""Stop strings over a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a stream where the first stop string is complete, and holds back only text that may become one.

    The stop string that is complete first wins; of several that end at the same character, the longest, so that the text is cut at
    the earliest place. The result does not depend on how the stream is split. Work per character: one automaton step per stop
    string (Knuth, Morris, Pratt).
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        # Longest first, so that the first one found complete is the one to report.
        self._stops = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the stream, None while there is none."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes a piece of the stream; returns text to emit and the stop string that ended it. After that, text is discarded."""
        if self.matched is not None or not self._stops:
            return ("" if self.matched is not None else text), self.matched
        for position, char in enumerate(text):
            found = self._step(char)
            if found is not None:
                self.matched = found
                whole = self._held + text[: position + 1]
                self._held = ""
                return (whole if self._include_stop else whole[: len(whole) - len(found)]), found
        whole = self._held + text
        keep = len(whole) - max(self._states)
        self._held = whole[keep:]
        return whole[:keep], None

    def finish(self) -> str:
        """The stream has ended without a stop string: returns the text held back."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        """Advances every automaton by one character; returns the longest stop string that is now complete."""
        found = None
        for index, (stop, table) in enumerate(zip(self._stops, self._tables, strict=True)):
            state = self._states[index]
            while state and stop[state] != char:
                state = table[state]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                found = found or stop
            self._states[index] = state
        return found


def _failure_table(stop: str) -> list[int]:
    """Entry k: the length of the longest proper prefix of `stop` that is also a suffix of its first k characters."""
    table = [0] * (len(stop) + 1)
    state = 0
    for index in range(1, len(stop)):
        while state and stop[state] != stop[index]:
            state = table[state]
        if stop[state] == stop[index]:
            state += 1
        table[index + 1] = state
    return table
