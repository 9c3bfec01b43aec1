"""Token counts of the slots that need them, on the device, and the penalties computed from them.

Counts follow the sampled tokens on the device, so the next step's penalties see a token that the host has not read yet.
"""

from __future__ import annotations

import numpy as np
import torch

from ep_runtime.engine.staging import upload
from model.state.paged import zeros


class PenaltyPool:
    """`max_rows` rows of counts, handed out to slots.

    A row is `generated` int32 [V] (how often each token was generated) and `prompted` bool [V] (whether the prompt holds it). All
    rows exist from the start, as the memory plan says, so that no request can find them missing.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.generated = zeros((max_rows, vocab_size), torch.int32, device)
        self.prompted = zeros((max_rows, vocab_size), torch.bool, device)
        self._free = list(range(max_rows - 1, -1, -1))
        self.taken: set[int] = set()

    def take(self, prompt: list[int], generated: list[int]) -> int:
        """A row that holds these tokens. IndexError when all are taken: there is one for each slot."""
        row = self._free.pop()
        self.taken.add(row)
        ids, counts = np.unique(np.array(generated, np.int64), return_counts=True)
        prompted = np.unique(np.array(prompt, np.int64))
        prompt_ids, generated_ids, times = upload((prompted, ids, counts.astype(np.int32)), self.device)
        self.prompted[row].zero_().index_fill_(0, prompt_ids, True)
        self.generated[row].zero_().index_copy_(0, generated_ids, times)
        return row

    def give(self, row: int) -> None:
        """Return a row."""
        self.taken.remove(row)
        self._free.append(row)

    def check_integrity(self) -> None:
        """Every row is either free or taken."""
        rows = sorted([*self._free, *self.taken])
        if rows != list(range(self.generated.shape[0])):
            raise AssertionError(f"penalty rows {self._free} free and {sorted(self.taken)} taken of {self.generated.shape[0]}")

    def count(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add one to `tokens` [M] int64 of pool rows `rows` [M] int64."""
        ones = torch.ones(rows.shape, dtype=torch.int32, device=self.device)
        self.generated.view(-1).index_add_(0, rows * self.vocab_size + tokens, ones)

    def penalise(
        self, logits: torch.Tensor, rows: torch.Tensor, repetition: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor
    ) -> torch.Tensor:
        """`logits` [M, V] after the three penalties, float32 [M, 1] each, with the counts of pool rows `rows` [M].

        Repetition (CTRL, Keskar et al. 2019, section 4.1) divides positive and multiplies negative logits of tokens that occur in
        prompt or output; presence and frequency (OpenAI) are subtracted once, and once an occurrence, for tokens of the output.
        """
        counts = self.generated.index_select(0, rows)
        produced = counts > 0
        seen = produced | self.prompted.index_select(0, rows)
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        return logits - presence * produced - frequency * counts
