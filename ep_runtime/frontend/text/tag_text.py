"""Plain text in front of a tag."""

from __future__ import annotations

from ep_runtime.frontend.text.reasoning import partial_suffix
from ep_runtime.frontend.text.tool_delta import CallList


class TagText:
    """Passes text on until `tag` comes. White space directly before a tag, and after a call, belongs to the call's syntax.

    It is held back until it is known what follows: dropped before a call, emitted before text, and emitted again if the call turns
    out to be none (`give_back`). Work per character does not grow with what is held back: white space is kept in pieces.
    """

    def __init__(self, tag: str, calls: CallList) -> None:
        self._tag = tag
        self._calls = calls
        self._space: list[str] = []
        self._start = ""  # of a tag, after the white space
        self._space_before_tag = ""
        self._after_call = False

    def push(self, text: str) -> str | None:
        """Takes text; returns what follows the tag once it has come, else None."""
        whole = self._start + text
        at = whole.find(self._tag)
        if at >= 0:
            self._pass_on(whole[:at])
            self._space_before_tag = "".join(self._space)
            self._space, self._start = [], ""
            return whole[at + len(self._tag) :]
        keep = len(whole) - partial_suffix(whole, self._tag)
        self._pass_on(whole[:keep])
        self._start = whole[keep:]
        return None

    def _pass_on(self, text: str) -> None:
        """Emits text up to its last white space, which waits."""
        plain = text.rstrip()
        if plain:
            self._emit("".join(self._space) + plain)
            self._space = []
        if len(plain) < len(text):
            self._space.append(text[len(plain) :])

    def give_back(self, raw: str) -> None:
        """What followed the tag was no call: the white space before it, the tag and `raw` are text."""
        self._emit(self._space_before_tag + self._tag + raw)
        self._space_before_tag = ""

    def call_ended(self) -> None:
        """What follows stands after a call."""
        self._after_call = True

    def finish(self) -> None:
        """The output has ended: emits what was held back, except mere white space after a call."""
        if self._start or not self._after_call:
            self._emit("".join(self._space) + self._start)
        self._space, self._start = [], ""

    def _emit(self, text: str) -> None:
        if text:
            self._after_call = False
            self._calls.text(text)
