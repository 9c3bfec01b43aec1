"""The results of a launched step: on their way from the device, then on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from msgspec.structs import replace

from ep_runtime.engine.sampler import RowStatus
from ep_runtime.engine.sampling.logprobs import LogprobRows, unpack_logprobs
from ep_runtime.scheduler.core import Plan, SpanResult, StepResult

if TYPE_CHECKING:
    from ep_runtime.engine.sampler import Sampled

FAULTS = {
    RowStatus.EMPTY: "no token is allowed at generated index {index}: grammar, logit_bias and min_tokens together exclude all",
    RowStatus.NOT_FINITE: "the model's logits at generated index {index} are not finite",
}
NOTHING = SpanResult()


class RowsToSample(NamedTuple):
    """The tokens to sample, a column each: of span `spans[i]`, from row `logit_rows[i]` of the forward's wanted rows.

    `indices` are the tokens' generated indices in their requests.
    """

    spans: list[int]
    slots: list[int]
    request_ids: list[str]
    logit_rows: list[int]
    indices: list[int]


NO_ROWS = RowsToSample([], [], [], [], [])


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
        rows: RowsToSample = NO_ROWS,
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
        results = [NOTHING] * len(self.plan.spans)
        failures: list[tuple[str, str]] = []
        if self._sampled is not None:
            failures = self._read_sampled(self._sampled, results)
        for prompt in self._prompt_rows:
            values = unpack_logprobs(prompt.rows, [prompt.count] * len(prompt.rows.ids))
            results[prompt.span] = replace(results[prompt.span], prompt_start=prompt.start, prompt_logprobs=values)
        return StepResult(plan=self.plan, spans=tuple(results)), failures

    def _read_sampled(self, sampled: Sampled, results: list[SpanResult]) -> list[tuple[str, str]]:
        """Put each sampled row's result in its span's place; the failures."""
        rows, depths = self._rows, self._depths
        for number, token in zip(rows.spans, sampled.tokens.tolist(), strict=True):
            results[number] = SpanResult(token)
        if depths is not None:
            for number in rows.spans:
                results[number] = replace(results[number], depth=depths[number])
        if sampled.logprobs is not None:
            found = unpack_logprobs(sampled.logprobs, sampled.logprob_counts)
            for row, entry in zip(sampled.logprob_rows, found, strict=True):
                number = rows.spans[row]
                results[number] = replace(results[number], logprobs=[entry])
        statuses = sampled.status.tolist()
        if not any(statuses):
            return []
        outcomes = zip(rows.request_ids, rows.indices, statuses, strict=True)
        return [(name, FAULTS[RowStatus(status)].format(index=index)) for name, index, status in outcomes if status]
