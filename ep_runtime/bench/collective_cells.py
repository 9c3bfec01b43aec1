"""The collectives that `bench collectives` measures: what each one computes, what it must give, and the variants of its kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ep_runtime.engine.comm import GroupCommunicator
from ep_runtime.engine.host_memory import Exchange

if TYPE_CHECKING:
    from ep_runtime.engine.peers import Peers
    from kernels.peer_memory import PeerMemory

DEADLINE_SECONDS = 60.0
"""For one cell, compilation included: a sum that waits for ever ends the benchmark, and leaves the device."""

CHECKS = 4
"""Calls that are compared in a row: each half of a buffer is used twice."""

EPS = 1e-6
WORK_WIDTH = 2048
WORK_ROWS = 256
"""Of the matrix products between calls, at most. Products of 8192 rows, five after another, are slower than the same with sums
between them, since they heat the GPU: taking their own time off took more than they had cost."""


class Problem:
    """One number of rows: what every rank brings, from seeds that all of them know, and the sum that it must come to."""

    def __init__(self, rows: int, width: int, rank: int, world: int, device: torch.device) -> None:
        self.rows = rows
        self.device = device
        self._width = width
        self._rank = rank
        self._world = world
        self.partial = self.part(0, rank)
        self._left = torch.randn(min(rows, WORK_ROWS), width, device=device).bfloat16()
        self._right = torch.randn(width, WORK_WIDTH, device=device).bfloat16() if device.type == "cuda" else None

    def part(self, call: int, rank: int) -> torch.Tensor:
        """What a rank brings to a call, bfloat16 `[rows, width]`."""
        generator = torch.Generator().manual_seed(1000 * call + rank)
        return torch.randn(self.rows, self._width, generator=generator).bfloat16().to(self.device)

    def parts(self, call: int) -> list[torch.Tensor]:
        """Every rank's, in rank order."""
        return [self.part(call, rank) for rank in range(self._world)]

    def total(self, call: int) -> torch.Tensor:
        """The sum in rank order in float32, rounded once."""
        first, *others = self.parts(call)
        total = first.float()
        for part in others:
            total += part.float()
        return total.bfloat16()

    def work(self, products: int) -> None:
        """So many matrix products, on a GPU."""
        assert self._right is not None
        for _ in range(products):
            torch.mm(self._left, self._right)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One collective of one problem. `check` raises `AssertionError` unless results are exact; `call` is what is timed."""

    collective: str
    variant: str
    problem: Problem
    check: Callable[[], None]
    call: Callable[[], object]
    captured: bool = False


def cpu_cells(group: GroupCommunicator, exchange: Exchange, problems: Sequence[Problem], only: str) -> Iterator[Cell]:
    """Through sockets, then through memory that the ranks share."""
    for way in ("gloo", "host memory"):
        if way == "host memory":
            group.join_host(exchange, DEADLINE_SECONDS)
        for problem in problems:
            cells = [_reduce_cell(group, problem, way), _gather_cell(group.gather_to_head, group.rank, problem, way)]
            yield from (cell for cell in cells if only in cell.collective)


def gpu_cells(
    group: GroupCommunicator,
    exchange: Exchange,
    peers: Sequence[Peers],
    problems: Sequence[Problem],
    variants: Sequence[str],
    only: str,
) -> Iterator[Cell]:
    """Through NCCL, then each variant of the kernels. A variant starts with cleared counters, as an epoch does."""
    for problem in problems:
        cell = _reduce_cell(group, problem, "nccl, eager")
        if only in cell.collective:
            yield cell
    for text in variants:
        group.join_peers(exchange, list(peers))
        sums, logits = (vary(memory.memory, text) for memory in peers)
        for problem in problems:
            for cell in _kernel_cells(sums, logits, problem, text):
                if only in cell.collective:
                    yield cell
        group.settle()
        exchange(b"")  # nobody clears its counters while another still waits


def vary(memory: PeerMemory, text: str) -> PeerMemory:
    """The memory used another way, such as "programs=64,pause=200"; "default" changes nothing. Raises `ValueError`."""
    from kernels.peer_memory import Waiting

    given = dict(part.split("=", 1) for part in text.split(",")) if text != "default" else {}
    names = {"spins": "spins", "pause": "pause_ns", "reader": "reader"}
    unknown = given.keys() - {"programs", "line", "word_rows", "shots", *names}
    if unknown:
        raise ValueError(f"{text!r}: no variant has {', '.join(sorted(unknown))}")
    if given.get("reader", "warps") not in ("warps", "thread", "atomic"):
        raise ValueError(f"{text!r}: a reader is warps, thread or atomic")
    waiting: dict[str, Any] = {names[key]: value if key == "reader" else int(value) for key, value in given.items() if key in names}
    changes: dict[str, Any] = {key: int(given[key]) for key in ("programs", "line", "word_rows") if key in given}
    if "shots" in given:
        if given["shots"] not in ("1", "2"):
            raise ValueError(f"{text!r}: a sum goes in 1 or 2 shots")
        changes["two_shots"] = given["shots"] == "2"
    return dataclasses.replace(memory, waiting=dataclasses.replace(Waiting(), **waiting), **changes)


def _reduce_cell(group: GroupCommunicator, problem: Problem, variant: str) -> Cell:
    def check() -> None:
        for call in range(CHECKS):
            _same(group.reduce(problem.part(call, group.rank)), problem.total(call))

    return Cell(
        collective="reduce",
        variant=variant,
        problem=problem,
        check=check,
        call=lambda: group.reduce(problem.partial),
    )


def _gather_cell(gather: Callable[[torch.Tensor], Any], rank: int, problem: Problem, variant: str) -> Cell:
    def check() -> None:
        for call in range(CHECKS):
            got = gather(problem.part(call, rank))
            if rank == 0:
                for mine, exact in zip(got, problem.parts(call), strict=True):
                    _same(mine, exact)

    return Cell(collective="gather_to_head", variant=variant, problem=problem, check=check, call=lambda: gather(problem.partial))


def _kernel_cells(sums: PeerMemory, logits: PeerMemory, problem: Problem, variant: str) -> list[Cell]:
    from kernels.peer_gather_triton import gather_rows
    from kernels.peer_sums import reduce_add_norm_rows, reduce_rows

    rank, partial = sums.rank, problem.partial
    weight = torch.ones(partial.shape[1], dtype=partial.dtype, device=partial.device)
    x = torch.zeros_like(partial)

    def check_sum() -> None:
        for call in range(CHECKS):
            _same(reduce_rows(sums, problem.part(call, rank)), problem.total(call))

    def check_norm() -> None:
        kept = torch.zeros_like(partial)
        for call in range(CHECKS):
            exact = (kept.float() + problem.total(call).float()).to(kept.dtype)
            normed = reduce_add_norm_rows(sums, problem.part(call, rank), kept, weight, EPS)
            _same(kept, exact)
            wide = exact.double()
            expected = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
            if float((normed.double() - expected).norm() / expected.norm()) > 1e-2:
                raise AssertionError("a sum was normalised wrongly")

    def check_gather() -> None:
        for call in range(CHECKS):
            gathered = gather_rows(logits, problem.part(call, rank))
            if rank == 0:
                _same(gathered, torch.cat(problem.parts(call), 1).float())

    kinds: list[tuple[str, Callable[[], None], Callable[[], object]]] = [
        ("reduce_rows", check_sum, lambda: reduce_rows(sums, partial)),
        ("reduce_add_norm_rows", check_norm, lambda: reduce_add_norm_rows(sums, partial, x, weight, EPS)),
        ("gather_rows", check_gather, lambda: gather_rows(logits, partial)),
    ]
    return [
        Cell(collective=name, variant=variant, problem=problem, check=check, call=call, captured=True)
        for name, check, call in kinds
    ]


def _same(got: torch.Tensor, exact: torch.Tensor) -> None:
    if not torch.equal(got, exact):
        wrong = int((got != exact).sum())
        raise AssertionError(f"{wrong} of {exact.numel()} elements are not the exact sum")
