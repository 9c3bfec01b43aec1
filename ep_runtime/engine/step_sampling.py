"""From one forward's logits to its sampled tokens and log-probabilities, on the head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from ep_runtime.engine.pending import PendingStep, PromptRows, RowsToSample
from ep_runtime.engine.sampler import pick_rows
from ep_runtime.engine.staging import upload
from protocol.commands import Forward, Span, Wanted

if TYPE_CHECKING:
    from ep_runtime.engine.requests import RequestTable
    from ep_runtime.engine.sampler import Sampler
    from ep_runtime.scheduler.core import Plan
    from kernels.shards_triton import LeftLogits
    from model.batch import ForwardOutput


class StepSampling:
    """The sampling of one launched plan: `choose` runs inside the forward command, `pending` is what is left to read.

    The masks of its rows are here: no row is planned before its own is.
    """

    def __init__(self, plan: Plan, sampler: Sampler, requests: RequestTable) -> None:
        self._plan = plan
        self._sampler = sampler
        self._requests = requests
        self._results = partial(PendingStep, plan)

    def choose(self, output: ForwardOutput, command: Forward) -> torch.Tensor:
        """Sample every sampled span's last row, in span order: `[n] int64` on the device."""
        logits = output.logits if output.left is None else output.left
        assert logits is not None, "the head's forward returns logits"
        ends = wanted_ends(self._plan.spans)
        prompt_rows = self._prompt_logprobs(logits, ends)
        rows = sampled_rows(self._plan, ends)
        if not rows.spans:
            self._results = partial(PendingStep, self._plan, prompt_rows=prompt_rows)
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        picked = logits
        if len(rows.spans) < len(logits):
            (chosen,) = upload([np.array(rows.logit_rows, np.int64)], logits.device)
            picked = pick_rows(logits, chosen)
        masks = self._requests.take_masks(rows.request_ids, rows.indices)
        sampled = self._sampler.sample(picked, rows.slots, rows.indices, masks)
        self._results = partial(PendingStep, self._plan, sampled, rows, prompt_rows, output.depths)
        return sampled.tokens

    def pending(self) -> PendingStep:
        """Everything the device computes for this plan, to be read later. Once, when its forward has been launched.

        Other ranks get the tokens before the host does: they wait for them.
        """
        pending = self._results()
        pending.mark(self._sampler.device)
        return pending

    def _prompt_logprobs(self, logits: torch.Tensor | LeftLogits, ends: list[int]) -> tuple[PromptRows, ...]:
        found = []
        for number, span in enumerate(self._plan.spans):
            if span.wanted is not Wanted.ALL:
                continue
            request = self._requests.get(self._plan.owners[number])
            if request is None or request.sampling.prompt_logprobs is None:
                continue
            targets = request.prompt[span.start + 1 : span.start + span.length + 1]
            if not targets:
                continue
            assert isinstance(logits, torch.Tensor), "logits of single rows alone are left where they are"
            first = ends[number] - span.length
            rows = logits[first : first + len(targets)]
            (ids,) = upload([np.array(targets, np.int64)], logits.device)
            count = request.sampling.prompt_logprobs
            found.append(PromptRows(number, span.start + 1, count, self._sampler.prompt_logprobs(rows, ids, count)))
        return tuple(found)


def count_wanted(span: Span) -> int:
    """How many rows of `span` want logits."""
    match span.wanted:
        case Wanted.LAST:
            return 1
        case Wanted.NONE:
            return 0
        case Wanted.ALL:
            return span.length
        case offsets:
            return len(offsets)


def wanted_ends(spans: Sequence[Span]) -> list[int]:
    """For each span, the index behind its last row among the forward's wanted rows."""
    last = Wanted.LAST
    return list(accumulate([1 if span.wanted is last else count_wanted(span) for span in spans]))


def sampled_rows(plan: Plan, ends: list[int]) -> RowsToSample:
    """The rows to sample, in span order: each sampled span's last wanted row."""
    numbers = [number for number, span in enumerate(plan.spans) if span.sampled]
    return RowsToSample(
        spans=numbers,
        slots=[span.slot for span in plan.spans if span.sampled],
        request_ids=[plan.owners[number] for number in numbers],
        logit_rows=[ends[number] - 1 for number in numbers],
        indices=[plan.indices[number] for number in numbers],
    )
