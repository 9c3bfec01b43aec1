"""Several loops from a request to the model's batch and back, on a lone rank whose model tells every token and every depth."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_runtime.engine.broadcast import Broadcaster
from ep_runtime.engine.epoch import LoneRank
from ep_runtime.engine.executor import Executor
from ep_runtime.engine.head import Head
from ep_runtime.engine.port import LocalPort
from ep_runtime.engine.sampler import Sampler
from ep_runtime.engine.setup import scheduler_limits
from ep_runtime.scheduler.core import SchedulerLimits
from ep_runtime.scheduler.scheduler import Scheduler
from model.base import Communicator
from model.batch import ForwardBatch, ForwardOutput, LoopRows
from model.spec import ModelSpec
from model.state.registry import StateRegistry
from protocol.commands import Alloc, Decode, Forward, Loops, Mixed, Span, Wanted
from protocol.links import HeadLinks
from protocol.messages import Results, SamplingParams, Submit
from protocol.preamble import RECORD_ROUTING
from protocol.slots import SlotLimits, SlotTable, check_integrity

VOCAB, SIZE = 50, 4
CPU = torch.device("cpu")
EXITS = Loops(3, [0.5, 0.25])


def next_token(tokens: Sequence[int], depths: Sequence[int]) -> int:
    """What follows these tokens, whose rows behind the prompt have run these loops (of several)."""
    return zlib.crc32(array("i", [*tokens, *depths]).tobytes()) % VOCAB


class Looped:
    """A model whose exits are drawn anew in each forward, so that a row that runs again runs other loops unless it is told."""

    def __init__(self, seed: int, max_loops: int = 4) -> None:
        self.batches: list[ForwardBatch] = []
        self.fails_at: set[int] = set()
        self.max_loops = max_loops
        self._exits = Random(seed)
        self._shared = 0
        self._histories: dict[int, tuple[list[int], list[int]]] = {}

    def spec(self) -> ModelSpec:
        return ModelSpec(
            architecture="Looped",
            family="looped",
            vocab_size=VOCAB,
            hidden_size=4,
            num_layers=0,
            layer_kinds=(),
            caches=(),
            max_positions=60,
            max_loops=self.max_loops,
        )

    def static_decode(self, block_size: int) -> bool:
        return False

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.token_ids[:, None].float().repeat(1, 4)

    def forward(self, batch: ForwardBatch, state: StateRegistry, comm: Communicator) -> ForwardOutput:
        self.batches.append(batch)
        # One that fails alone would be to blame.
        self._shared += len(batch.host.slots) > 1
        if len(batch.host.slots) > 1 and self._shared in self.fails_at:
            raise ValueError("this forward fails")
        depths, rows, loops = [], torch.zeros(batch.num_rows, VOCAB), batch.loops
        starts = batch.host.query_start.tolist()
        for span, (first, stop, slot) in enumerate(zip(starts, starts[1:], batch.host.slots.tolist(), strict=False)):
            depth = self._depth(loops, span) if loops is not None else 1
            several = loops is not None and loops.most[span] > 1
            history, ran = self._histories.setdefault(slot, ([], []))
            if int(batch.host.seq_lens[span]) == stop - first:
                history.clear()
                ran.clear()
            if several and not (loops is not None and loops.prompt[span]):
                assert stop - first == 1, "rows of several loops in one piece"
                ran.append(depth)
            for row, token in enumerate(batch.token_ids[first:stop].tolist(), first):
                history.append(token)
                rows[row, next_token(history, ran)] = 1.0
            depths.append(depth)
        return ForwardOutput(logits=rows[batch.wanted_rows], depths=None if loops is None else tuple(depths))

    def _depth(self, loops: LoopRows, span: int) -> int:
        if loops.prompt[span]:
            return 0
        if loops.depth[span] or not loops.thresholds[span]:
            return loops.depth[span] or loops.most[span]
        return self._exits.randint(1, loops.most[span])


class Engine:
    """A lone rank with its head, one epoch long; what each request was told."""

    def __init__(self, seed: int = 0, *, lookahead: bool = False, slots: int = 4, num_blocks: int = 60, max_loops: int = 4) -> None:
        self.model = Looped(seed, max_loops)
        limits = SlotLimits(
            max_slots=slots, num_blocks=num_blocks, block_size=SIZE, max_length=60, max_rows=16, max_loops=max_loops
        )
        state = StateRegistry(
            self.model.spec(), max_slots=slots, num_blocks=num_blocks, block_size=SIZE, dtype=torch.float32, device=CPU
        )
        self.executor = Executor(self.model, state, LoneRank(), limits, CPU, dtype=torch.float32)
        self.slots, self._limits = SlotTable(limits), limits
        self.broadcaster = Broadcaster(
            self.executor, HeadLinks([], 0, lambda: False), self.slots, epoch=0, version=2, deadline_s=10.0
        )
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_slots=slots,
                num_blocks=num_blocks,
                block_size=SIZE,
                max_model_len=60,
                max_batch_tokens=16,
                max_queue=100,
                prefix_cache=True,
                max_loops=max_loops,
            )
        )
        self.port = LocalPort(self._take)
        self.head = Head(
            broadcaster=self.broadcaster,
            scheduler=self.scheduler,
            sampler=Sampler(VOCAB, slots, CPU, ()),
            port=self.port,
            epoch=0,
            digest_interval=3,
            read_when_ready=not lookahead,
        )
        self.sent: dict[str, Submit] = {}
        self.tokens: dict[str, list[int]] = {}
        self.depths: dict[str, list[int]] = {}
        self.ended: dict[str, tuple[str, int, str | None]] = {}

    def submit(self, name: str, prompt: list[int], most: int = 8, loops: Loops | None = EXITS, **changes: Any) -> None:
        fields = {key: changes.pop(key) for key in ("generated", "depths", "suspicions") if key in changes}
        params = SamplingParams(seed=0, max_tokens=most, temperature=0.0, loops=loops, **changes)
        self.sent[name] = Submit(request_id=name, group=name, prompt=prompt, sampling=params, **fields)
        self.tokens[name], self.depths[name] = [], []
        self.port.send(self.sent[name])

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.head.turn(idle_wait_s=0.0)
            self.scheduler.check_integrity()
            check_integrity(self.slots, self._limits)

    def finish(self) -> None:
        for _ in range(2000):
            self.turn()
            if self.head.idle:
                break
        assert self.ended.keys() == self.sent.keys()
        self.head.shutdown()

    def check(self) -> None:
        """Every token is the one that all tokens and all noted loops before it give."""
        for name, sent in self.sent.items():
            loops = sent.sampling.loops
            several = loops is not None and loops.most > 1
            known, depths = [*sent.prompt, *sent.generated], [*sent.depths, *self.depths[name]]
            assert len(self.depths[name]) == len(self.tokens[name]) * several
            for number, token in enumerate(self.tokens[name], len(sent.generated)):
                assert token == next_token(known, depths[1 : number + 1] if several else ()), (name, number)
                known.append(token)

    def _take(self, results: Results) -> None:
        for update in results.updates:
            self.tokens[update.request_id] += update.tokens
            self.depths[update.request_id] += update.depths
            if update.finish is not None:
                self.ended[update.request_id] = (update.finish, update.status, update.error)


@pytest.mark.parametrize("lookahead", [False, True])
def test_the_model_is_told_the_loops_of_each_span_and_its_depths_reach_the_updates(lookahead: bool) -> None:
    engine = Engine(lookahead=lookahead)
    engine.submit("several", [1, 2, 3])
    engine.submit("all", [4, 5], loops=Loops(4))
    engine.submit("one", [6, 7], loops=Loops(1))
    engine.submit("none", [8], loops=None)
    engine.finish()
    engine.check()
    assert all(finish == "length" for finish, _, _ in engine.ended.values())
    assert engine.depths["several"][0] == engine.depths["all"][0] == 0
    assert set(engine.depths["several"][1:]) == {1, 2, 3}
    assert engine.depths["all"][1:] == [4] * 7
    first, second = engine.model.batches[:2]
    assert first.loops == LoopRows(most=(3, 4, 1, 1), thresholds=((0.5, 0.25), (), (), ()), depth=(0, 0, 0, 0), prompt=(True,) * 4)
    assert second.loops == LoopRows(
        most=(3, 4, 1, 1), thresholds=((0.5, 0.25), (), (), ()), depth=(0, 0, 0, 0), prompt=(False,) * 4
    )


def test_a_batch_of_one_loop_has_no_loops_whatever_else_lives() -> None:
    engine = Engine(slots=2)
    engine.submit("one", [1, 2], loops=None)
    engine.turn(2)
    assert all(batch.loops is None for batch in engine.model.batches)
    # A suspect runs alone: its steps and the other's take turns while both hold a slot.
    engine.submit("alone", [3], suspicions=2)
    engine.finish()
    engine.check()
    kinds = [None if batch.loops is None else batch.loops.most for batch in engine.model.batches]
    assert set(kinds) == {None, (3,)}
    assert kinds.index((3,)) < len(kinds) - 1 - kinds[::-1].index(None)


@pytest.mark.parametrize("lookahead", [False, True])
def test_replay_in_another_epoch_runs_the_noted_loops(lookahead: bool) -> None:
    before = Engine(1, lookahead=lookahead)
    before.submit("a", [1, 2, 3], 20)
    before.submit("b", [4, 5], 20, loops=Loops(4, [0.1, 0.2, 0.3]))
    before.submit("c", [6], 20, loops=None)
    while any(len(tokens) < 6 for tokens in before.tokens.values()):
        before.turn()
    after = Engine(2, lookahead=lookahead)
    for name, sent in before.sent.items():
        after.submit(
            name, sent.prompt, 20, sent.sampling.loops, generated=before.tokens[name], depths=before.depths[name], logprobs=0
        )
    after.finish()
    after.check()
    assert [len(before.tokens[name]) + len(after.tokens[name]) for name in "abc"] == [20, 20, 20]
    told = []
    for batch in after.model.batches[1 : len(before.tokens["a"])]:
        assert batch.loops is not None
        told.append(batch.loops.depth[batch.host.slots.tolist().index(0)])
    assert told == before.depths["a"][1:]


def test_preempted_and_failed_rows_run_the_loops_that_were_told() -> None:
    engine = Engine(3, slots=3, num_blocks=9, lookahead=True)
    engine.model.fails_at = {5, 25, 26}
    for name in "abc":
        engine.submit(name, [ord(name) % 50, 2, 3], 14)
    engine.finish()
    engine.check()
    assert engine.scheduler.stats().preemptions > 0
    assert [ended[0] for ended in engine.ended.values()] == ["length"] * 3
    told = [depth for batch in engine.model.batches if batch.loops is not None for depth in batch.loops.depth]
    assert sum(depth > 0 for depth in told) > 10


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loops": Loops(5)}, "loops are 5, this model has at most 4"),
        ({"loops": Loops(3, [0.5])}, "1 exit thresholds, 3 loops have 2"),
        ({"generated": [1]}, "0 depths are given for 1 generated tokens"),
        ({"loops": None, "depths": [0]}, "1 depths are given for a sequence of one loop"),
        ({"prompt": [1] * 17}, "max_num_batched_tokens"),
    ],
)
def test_a_request_that_cannot_be_served_ends_with_400_and_spares_the_others(changes: dict[str, Any], text: str) -> None:
    engine = Engine()
    engine.submit("good", [1, 2])
    engine.turn(2)
    engine.submit("bad", **{"prompt": [1, 2], **changes})
    engine.finish()
    engine.check()
    finish, status, error = engine.ended["bad"]
    assert (finish, status) == ("error", 400)
    assert text in (error or "")
    assert engine.ended["good"] == ("length", 200, None)


def test_a_model_that_is_not_looped_refuses_several_loops() -> None:
    engine = Engine(max_loops=1)
    engine.submit("bad", [1, 2])
    engine.submit("good", [1, 2], loops=Loops(1))
    engine.finish()
    assert engine.ended["bad"][:2] == ("error", 400)
    assert engine.ended["good"][0] == "length"
    assert all(batch.loops is None for batch in engine.model.batches)


class Graphs:
    """In the place of captured steps: keeps what is asked of it."""

    def __init__(self) -> None:
        self.replays: list[list[int]] = []

    def bucket(self, rows: int) -> int:
        return rows

    def run(self, step: int, columns: Sequence[Sequence[int]]) -> ForwardOutput:
        self.replays.append(list(columns[3]))
        return ForwardOutput(logits=torch.zeros(step, VOCAB))


def decode(*slots: int, depth: int = 0) -> Decode:
    return Decode(spans=[Span(slot, 2, 1, depth == 0, depth == 0, Wanted.LAST, [], depth) for slot in slots])


def tokens_of(output: ForwardOutput, command: Forward) -> torch.Tensor:
    return torch.zeros(sum(span.sampled for span in command.spans), dtype=torch.int64)


@pytest.mark.parametrize(("slots", "graph"), [((0, 1), True), ((0,), True), ((0, 2), False), ((2,), False), ((2, 0), False)])
def test_a_step_with_a_row_of_several_loops_takes_no_graph(slots: tuple[int, ...], graph: bool) -> None:
    engine, graphs = Engine(), Graphs()
    run = engine.broadcaster.run
    for slot, loops in enumerate((None, Loops(1), EXITS)):
        run(Alloc(token_budget=20, prompt_length=2, loops=loops), slot)
    prompts = [Span(slot, 0, 2, False, True, Wanted.LAST, [slot]) for slot in range(3)]
    run(Mixed(spans=prompts), 2**32 - 1, tokens=[1] * 6, choose=tokens_of)
    engine.executor._graphs = graphs  # type: ignore[assignment]
    run(decode(*slots), 2**32 - 1, choose=tokens_of)
    assert graphs.replays == ([list(slots)] if graph else [])
    assert len(engine.model.batches) == 2 - graph


def test_recorded_forwards_have_their_loops_too() -> None:
    engine = Engine()
    engine.broadcaster.run(Alloc(token_budget=20, prompt_length=2, loops=EXITS), 0)
    whole = Mixed(spans=[Span(0, 0, 2, False, False, Wanted.NONE, [0])])
    engine.broadcaster.run(whole, 2**32 - 1, tokens=[1, 2], flags=RECORD_ROUTING)
    engine.broadcaster.run(decode(0, depth=2), 2**32 - 1, tokens=[3], choose=tokens_of, flags=RECORD_ROUTING)
    assert [batch.loops and batch.loops.depth for batch in engine.model.batches] == [(0,), (2,)]
    assert all(batch.routing for batch in engine.model.batches)


def test_the_schedulers_limits_have_the_models_loops() -> None:
    spec = Looped(0, 3).spec()
    rank = SimpleNamespace(config=SimpleNamespace(max_queue=1, enable_prefix_caching=False), spec=spec, max_image_tokens=0)
    limits = scheduler_limits(rank, Engine(max_loops=3)._limits)  # type: ignore[arg-type]
    assert limits.max_loops == 3
    # A prompt of several loops is scored whole.
    assert limits.max_scored_rows >= limits.max_batch_tokens
