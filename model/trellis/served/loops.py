"""Which rows run loops 2 and later.

A prompt that asks for several loops is one span: at boundary j the capacity router takes the ceil(rho_j n) best of its n rows, as
in the library's forward. A decoded row is inside every capacity; what stops it is the depth it is given, or an exit head whose
probability reaches the sequence's threshold. Each sequence is routed by its own rows alone, whatever shares the batch.
"""

from __future__ import annotations

import torch
from torch import nn

from model.base import Communicator
from model.batch import ForwardBatch, LoopRows
from model.errors import BatchError
from model.trellis.heads import ExitHeads
from model.trellis.router import CapacityRouter
from model.trellis.served.rows import Chosen, Rows, some_rows


class LoopSchedule:
    """The routing of one forward. Ask for each loop from 2 on, in turn, with the hidden states `[T, d]` after the one before."""

    def __init__(
        self, batch: ForwardBatch, loops: LoopRows, every: Rows, routers: nn.ModuleDict, exits: ExitHeads, comm: Communicator
    ) -> None:
        self._batch = batch
        self._loops = loops
        self._every = every
        self._routers = routers
        self._exits = exits
        self._comm = comm
        starts = batch.host.query_start.tolist()
        self._row = {span: starts[span] for span in range(len(loops.most)) if starts[span + 1] - starts[span] == 1}
        self._going = list(self._row)
        self._chosen: dict[int, torch.Tensor | None] = {}
        self._ran = [1] * len(loops.most)

    @property
    def depths(self) -> tuple[int, ...]:
        """For each span how many loops its row ran, 0 for a prompt."""
        return tuple(0 if prompt else ran for ran, prompt in zip(self._ran, self._loops.prompt, strict=True))

    def rows(self, loop: int, h: torch.Tensor) -> Rows | None:
        """Who runs `loop`; None when no row does, in this loop or a later one."""
        self._going = self._still_going(loop, h)
        for span in self._going:
            self._ran[span] = loop
        chosen = [
            Chosen(span, self._choose(loop, span.span, h[span.start : span.stop]))
            for span in self._batch.host.pieces
            if self._loops.most[span.span] >= loop
        ]
        if not self._going and not chosen:
            return None
        if len(self._going) + len(chosen) == len(self._ran) and all(positions is None for _, positions in chosen):
            return self._every
        return some_rows(self._batch, self._going, chosen)

    def _still_going(self, loop: int, h: torch.Tensor) -> list[int]:
        """The spans of one row that run `loop`. Waits for the device where thresholds decide."""
        loops = self._loops
        going = [span for span in self._going if (loops.depth[span] or loops.most[span]) >= loop]
        asked = [span for span in going if loops.thresholds[span] and not loops.depth[span] and not loops.prompt[span]]
        if not asked:
            return going
        rows = torch.tensor([self._row[span] for span in asked]).to(h.device, non_blocking=True)
        scores: torch.Tensor = self._exits[str(loop - 1)](h.index_select(0, rows))
        self._comm.settle()
        chances = scores.double().sigmoid().tolist()
        stopped = {span for span, chance in zip(asked, chances, strict=True) if chance >= loops.thresholds[span][loop - 2]}
        return [span for span in going if span not in stopped]

    def _choose(self, loop: int, span: int, h: torch.Tensor) -> torch.Tensor | None:
        """Positions in a prompt `h [n, d]` that run `loop`, None for all. How many follows from n alone."""
        router = self._routers[str(loop)]
        assert isinstance(router, CapacityRouter)
        before = self._chosen.get(span)
        decision = router(h.unsqueeze(0), None if before is None else before.unsqueeze(0))
        self._chosen[span] = None if decision.count == h.shape[0] else decision.positions[0]
        return self._chosen[span]


def check_loops(batch: ForwardBatch, k_max: int) -> None:
    """Raise BatchError, naming the span, for loops that this model or the kind of span does not allow."""
    loops = batch.loops
    if loops is None:
        return
    lens, totals = (batch.host.query_start[1:] - batch.host.query_start[:-1]).tolist(), batch.host.seq_lens.tolist()
    if {len(loops.most), len(loops.thresholds), len(loops.depth), len(loops.prompt)} != {len(lens)}:
        raise BatchError(f"loops for {len(loops.most)} spans of a batch of {len(lens)}")
    for span, (most, thresholds, depth, prompt) in enumerate(
        zip(loops.most, loops.thresholds, loops.depth, loops.prompt, strict=True)
    ):
        rows, total = lens[span], totals[span]
        if not 1 <= most <= k_max or not 0 <= depth <= most or len(thresholds) not in (0, most - 1):
            raise BatchError(
                f"span {span}: {most} loops, depth {depth}, {len(thresholds)} thresholds; this model runs at most {k_max} loops"
            )
        if most > 1 and (rows != total if prompt else rows != 1):
            kind = "a prompt in one piece" if prompt else "one row"
            raise BatchError(f"span {span}: {rows} rows up to position {total}; with {most} loops it is {kind}")
        if depth and (prompt or most == 1):
            raise BatchError(f"span {span}: a depth of {depth} for {'a prompt' if prompt else 'a sequence of one loop'}")
