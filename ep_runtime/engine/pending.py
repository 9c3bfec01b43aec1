"""The results of a launched step: on their way from the device, then on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ep_runtime.engine.sampler import RowStatus, unpack
from ep_runtime.engine.sampling.logprobs import LogprobRows, unpack_logprobs
from ep_runtime.scheduler.core import Plan, SpanResult, StepResult

if TYPE_CHECKING:
    from ep_runtime.engine.sampler import Sampled

FAULTS = {
    RowStatus.EMPTY: "no token is allowed at generated index {index}: grammar, logit_bias and min_tokens together exclude all",
    RowStatus.NOT_FINITE: "the model's logits at generated index {index} are not finite",
}
NOTHING = SpanResult()


@dataclass(slots=True)
class RowToSample:
    """One token to sample: row `logit_row` of the forward's wanted rows, for generated index `index` of a request."""

    span: int
    slot: int
    request_id: str
    logit_row: int
    index: int


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Log-probabilities of the prompt tokens from position `start` on, of one span, with `count` alternatives each."""

    span: int
    start: int
    count: int
    rows: LogprobRows


class PendingStep:
    """One launched plan and what the device computes for it. Copies to the host start at once; `read` waits for nothing.

    `depths` are the loops that each span's row ran, where the model has said so; the host knows them already.
    """

    def __init__(
        self,
        plan: Plan,
        sampled: Sampled | None = None,
        rows: tuple[RowToSample, ...] = (),
        prompt_rows: tuple[PromptRows, ...] = (),
        depths: tuple[int, ...] | None = None,
    ) -> None:
        self.plan = plan
        self._rows = rows
        self._depths = depths
        self._sampled = None if sampled is None else sampled.to_host_async()
        self._prompt_rows = [PromptRows(p.span, p.start, p.count, p.rows.to_host_async()) for p in prompt_rows]
        self._done: torch.cuda.Event | None = None
        if sampled is not None:
            self.mark(sampled.tokens.device)

    def mark(self, device: torch.device) -> None:
        """All that the step launches has been launched: it is done when the device gets here, if nothing earlier tells.

        A step that samples nothing has results, too, and a device that fails in it must be found before a step behind it runs.
        """
        if self._done is None and device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    def ready(self) -> bool:
        """True when the device is done and every copy has arrived."""
        return self._done is None or self._done.query()

    def read(self) -> tuple[StepResult, list[tuple[str, str]]]:
        """The step's results, and the requests that must fail, each with a message (no usable token). Only when `ready`."""
        sampled = unpack(self._sampled) if self._sampled is not None else []
        results = [NOTHING] * len(self.plan.spans)
        failures = []
        for row, result in zip(self._rows, sampled, strict=True):
            logprobs = None if result.logprobs is None else [result.logprobs]
            depth = 0 if self._depths is None else self._depths[row.span]
            results[row.span] = SpanResult(result.token, logprobs, depth=depth)
            if result.status is not RowStatus.OK:
                failures.append((row.request_id, FAULTS[result.status].format(index=row.index)))
        for prompt in self._prompt_rows:
            values = unpack_logprobs(prompt.rows, [prompt.count] * len(prompt.rows.ids))
            results[prompt.span] = results[prompt.span]._replace(prompt_start=prompt.start, prompt_logprobs=values)
        return StepResult(plan=self.plan, spans=tuple(results)), failures
