"""From the updates of one sample to its completion."""

from __future__ import annotations

from ep_runtime.frontend.choice import Choice, ChoiceParts
from ep_runtime.frontend.text.detokenizer import IncrementalDetokenizer
from ep_runtime.frontend.text.stops import StopMatcher
from ep_runtime.frontend.text.tokenizer import Tokenizer
from ep_runtime.offline.samples import Completion, RequestOutput, SamplingParams
from protocol.messages import SequenceUpdate


class Collector:
    """Gathers one sample's updates; its text goes the way of a served answer, stop strings included."""

    def __init__(self, output: RequestOutput, completion: Completion, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self._output = output
        self._completion = completion
        self._choice = None if tokenizer is None else _choice(completion.index, output.prompt_token_ids, params, tokenizer)

    def take(self, update: SequenceUpdate) -> bool:
        """Add an update; True when the sample is over, by its own end or by a stop string."""
        completion = self._completion
        if completion.index == 0:
            self._output.prompt_logprobs += update.prompt_logprobs or []
            self._output.cached_tokens += update.cached
        if self._choice is None:
            return self._take_ids(update)
        delta = self._choice.push(update)
        completion.text += delta.content
        completion.token_ids += delta.token_ids
        completion.token_loops += delta.depths
        completion.logprobs += delta.logprobs
        if delta.finish is None:
            return False
        completion.finish_reason, completion.stop_reason, completion.error = delta.finish, delta.stop_reason, update.error
        return True

    def _take_ids(self, update: SequenceUpdate) -> bool:
        """Without a tokenizer there is no text, and no stop string in it."""
        completion = self._completion
        completion.token_ids += update.tokens
        completion.token_loops += update.depths
        completion.logprobs += update.logprobs or []
        if update.finish is None:
            return False
        completion.finish_reason, completion.stop_reason, completion.error = update.finish, update.stop_token, update.error
        return True


def _choice(index: int, prompt: list[int], params: SamplingParams, tokenizer: Tokenizer) -> Choice:
    """What makes the sample's text of its tokens."""
    parts = ChoiceParts(
        detokenizer=IncrementalDetokenizer(tokenizer, prompt[-8:], params.skip_special_tokens),
        stops=StopMatcher(list(params.stop), params.include_stop_str_in_output),
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )
    return Choice(index, parts)
