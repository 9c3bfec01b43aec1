"""One generated sequence as its client sees it: text, reasoning, tool calls, ids and logprobs of each update. Pure; no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from ep_runtime.frontend.text.detokenizer import IncrementalDetokenizer
from ep_runtime.frontend.text.reasoning import ReasoningSplitter
from ep_runtime.frontend.text.stops import StopMatcher
from ep_runtime.frontend.text.tools import ToolCallDelta, ToolParser
from protocol.messages import SequenceUpdate, TokenLogprobs


@dataclass(slots=True, kw_only=True)
class ChoiceDelta:
    """What one update adds to a choice. `logprobs` and `depths` pair with `token_ids`. `finish` is set in the last one alone.

    `prompt_bytes` is the memory of the prompt's logprobs that came with it.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None
    prompt_bytes: int = 0

    def cost(self) -> int:
        """Bytes that this holds until it is written, roughly."""
        text = len(self.content) + len(self.reasoning) + sum(len(call.arguments) for call in self.tool_calls)
        return 64 + 4 * text + 8 * len(self.token_ids) + 8 * len(self.depths) + logprobs_cost(self.logprobs) + self.prompt_bytes


def logprobs_cost(entries: list[TokenLogprobs]) -> int:
    """Bytes of memory of these entries, roughly: an id and a float are objects."""
    return sum(128 + 64 * len(entry.top_ids) for entry in entries) if entries else 0


@dataclass(slots=True, kw_only=True)
class ChoiceParts:
    """The text machinery of one choice. `reasoning` and `tools` are None where the output is not split."""

    detokenizer: IncrementalDetokenizer
    stops: StopMatcher
    reasoning: ReasoningSplitter | None = None
    tools: ToolParser | None = None
    include_stop: bool = False
    min_tokens: int = 0
    single_tool_call: bool = False
    tool_finish: str = "tool_calls"


class Choice:
    """Turns SequenceUpdates into ChoiceDeltas and remembers what the final usage and `prompt_logprobs` need.

    `loops` are those of all tokens that a generated token's row has sampled, `decoded` in number, where they may be several.
    """

    def __init__(self, index: int, parts: ChoiceParts) -> None:
        self.index = index
        self.generated = 0
        self.decoded = 0
        self.loops = 0
        self.cached: int | None = None
        self.finish: str | None = None
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}
        self._parts = parts
        self._called_tool = False

    def push(self, update: SequenceUpdate) -> ChoiceDelta:
        """Take one update. Sets `finish` when it was the last, or when a stop string is complete: what follows is discarded."""
        if self.cached is None:
            self.cached = update.cached
        delta = ChoiceDelta(index=self.index)
        if update.prompt_logprobs is not None:
            delta.prompt_bytes = logprobs_cost(self._keep_prompt(update.prompt_start, update.prompt_logprobs))
        text, matched = self._text(update, delta)
        if matched is not None:
            self.finish, delta.stop_reason = "stop", matched
        elif update.finish is not None:
            self.finish, delta.stop_reason = update.finish, update.stop_token
        self._split(text, delta)
        if self.finish == "stop" and self._called_tool:
            self.finish = self._parts.tool_finish
        delta.finish = self.finish
        return delta

    def _keep_prompt(self, start: int, entries: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Keep the prompt's logprobs; returns the new ones. A replay computes the prompt again, and what was known stays."""
        known = self.prompt_logprobs
        fresh = {position: entry for position, entry in enumerate(entries, start) if position not in known}
        known.update(fresh)
        return list(fresh.values())

    def _text(self, update: SequenceUpdate, delta: ChoiceDelta) -> tuple[str, str | None]:
        parts, pieces, matched = self._parts, [], None
        shown = len(update.tokens) - (update.stop_token is not None and not parts.include_stop)
        for position, token in enumerate(update.tokens):
            delta.token_ids.append(token)
            if update.logprobs is not None:
                delta.logprobs.append(update.logprobs[position])
            if update.depths:
                self._count_loops(update.depths[position], delta)
            self.generated += 1
            if position < shown:
                piece, matched = self._through_stops(parts.detokenizer.push([token]))
                pieces.append(piece)
            if matched is not None:
                return "".join(pieces), matched
        if update.finish is not None:
            piece, matched = self._through_stops(parts.detokenizer.finish())
            pieces.append(piece)
            if matched is None:
                pieces.append(parts.stops.finish())
        return "".join(pieces), matched

    def _count_loops(self, depth: int, delta: ChoiceDelta) -> None:
        delta.depths.append(depth)
        if depth:
            self.decoded += 1
            self.loops += depth

    def _through_stops(self, text: str) -> tuple[str, str | None]:
        if self.generated < self._parts.min_tokens:
            return text, None
        return self._parts.stops.push(text)

    def _split(self, text: str, delta: ChoiceDelta) -> None:
        parts = self._parts
        content = text
        if parts.reasoning is not None:
            delta.reasoning, content = parts.reasoning.push(text)
            if self.finish is not None:
                reasoning, rest = parts.reasoning.finish()
                delta.reasoning += reasoning
                content += rest
        if parts.tools is not None:
            content, calls = parts.tools.push(content)
            if self.finish is not None:
                rest, more = parts.tools.finish()
                content, calls = content + rest, [*calls, *more]
            delta.tool_calls = [call for call in calls if call.index == 0 or not parts.single_tool_call]
            self._called_tool = self._called_tool or bool(delta.tool_calls)
        delta.content = content
