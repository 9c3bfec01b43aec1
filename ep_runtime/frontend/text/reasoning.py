"""Splits a model's output into its reasoning (`<think>...</think>`) and its content."""

from __future__ import annotations

from ep_runtime.frontend.text.spaced_tag import SpacedTag

OPEN = "<think>"
CLOSE = "</think>"
REASONING_NAMES = ("auto", "none", "qwen3", "deepseek")


def reasoning_splitter(name: str, prompt_text: str = "") -> ReasoningSplitter:
    """The splitter `name` for an output that follows `prompt_text` (the rendered chat; its end is enough).

    "qwen3": the output is reasoning from its start if the prompt ends with an open `<think>`, or if it begins with one itself.
    "deepseek": the output starts inside the reasoning, whether the prompt or the model opens it or nobody does, unless the prompt
    has closed it. "auto" is "qwen3": it leaves the output of models without reasoning as it is. "none" splits nothing.
    Raises ValueError for another name.
    """
    if name not in REASONING_NAMES:
        raise ValueError(f"unknown reasoning parser {name!r}; known: {', '.join(REASONING_NAMES)}")
    if name == "none":
        return ReasoningSplitter("content")
    tail = prompt_text.rstrip()
    if tail.endswith(OPEN):
        return ReasoningSplitter("inside")
    if tail.endswith(CLOSE):
        return ReasoningSplitter("content")
    return ReasoningSplitter("inside" if name == "deepseek" else "undecided")


class ReasoningSplitter:
    """A stream splitter; its result does not depend on how the stream is cut into pieces.

    Tags are dropped, and so are the line breaks next to them. Held back is only what may be a part of a tag or such a line break.
    A `<think>` after the reasoning has ended is content. Work per character does not grow with what is held back.

    States: undecided (may open the reasoning) and inside (may repeat the prompt's tag) -> lead (line breaks after the tag) ->
    body -> after (line breaks after the end) -> content.
    """

    def __init__(self, state: str) -> None:
        self._state = state
        self._opening = SpacedTag(OPEN)
        self._breaks: list[str] = []  # line breaks that the end tag may follow
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        """True while the stream is inside the reasoning."""
        return self._state in ("inside", "lead", "body")

    def push(self, text: str) -> tuple[str, str]:
        """Takes a piece of the output; returns (reasoning, content) to emit."""
        reasoning = ""
        if self._state in ("undecided", "inside"):
            text = self._open(text)
        self._held += text
        if self._state == "lead":
            self._skip_lines("body")
        if self._state == "body":
            reasoning = self._body()
        if self._state == "after":
            self._skip_lines("content")
        if self._state != "content":
            return reasoning, ""
        content, self._held = self._held, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """The output has ended: returns what was held back, as (reasoning, content)."""
        held = (self._opening.raw if self._state in ("undecided", "inside") else "") + "".join(self._breaks) + self._held
        self._breaks, self._held = [], ""
        return (held, "") if self.in_reasoning else ("", held)

    def _open(self, text: str) -> str:
        """Decides what the output begins with: an opening tag, or something else. Returns what follows."""
        rest = self._opening.push(text)
        if rest is None:
            return ""
        self._state = "lead" if self._opening.found or self._state == "inside" else "content"
        return rest

    def _skip_lines(self, following: str) -> None:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = following

    def _body(self) -> str:
        end = self._held.find(CLOSE)
        keep = end if end >= 0 else len(self._held) - partial_suffix(self._held, CLOSE)
        passed, self._held = self._held[:keep], self._held[keep:]
        reasoning = passed.rstrip("\n")
        if reasoning:
            breaks, self._breaks = "".join(self._breaks), []
        else:
            breaks = ""
        if len(reasoning) < len(passed):
            self._breaks.append(passed[len(reasoning) :])
        if end >= 0:
            self._breaks, self._held = [], self._held[len(CLOSE) :]
            self._state = "after"
        return breaks + reasoning


def partial_suffix(text: str, tag: str) -> int:
    """Length of the longest proper prefix of `tag` with which `text` ends."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
