"""How to generate, and what comes of it: what users of the `LLM` give and get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ep_runtime.frontend.sampling import derive_seed
from protocol import messages
from protocol.commands import Loops
from protocol.messages import TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to generate. Names and defaults are vLLM's; `seed` None draws one for each prompt.

    `max_loops` and `exit_thresholds` are for looped models, as in requests of the server; None takes the `LLM`'s own settings.
    """

    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    max_loops: int | None = None
    exit_thresholds: Sequence[float] | None = None

    def for_sample(self, seed: int, index: int, room: int, loops: Loops | None) -> messages.SamplingParams:
        """The engine's parameters for sample `index` of a prompt that leaves `room` tokens; each may run so many `loops`."""
        return messages.SamplingParams(
            seed=derive_seed(seed, index),
            max_tokens=min(self.max_tokens, room),
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            stop_token_ids=list(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            loops=loops,
        )


@dataclass(kw_only=True, slots=True)
class Completion:
    """One sample. `finish_reason` is "stop", "length" or "error" (then `error` says why).

    Where several loops may run, `token_loops` has those of the row that sampled each of `token_ids`, 0 for the prompt's last.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_loops: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """One prompt and its samples. `prompt_logprobs[i]` is for prompt position i + 1."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
