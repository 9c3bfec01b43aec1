"""What a digest covers, what it launches and when it waits, on a lone rank with a model that returns what it is given."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ep_runtime.engine.broadcast import Broadcaster
from ep_runtime.engine.digest import read_sums
from ep_runtime.engine.epoch import LoneRank
from ep_runtime.engine.executor import Executor
from model.base import Communicator
from model.batch import ForwardBatch, ForwardOutput
from model.spec import LayerKind, ModelSpec, StateSpec
from model.state.checksum import checksum, mix
from model.state.registry import StateRegistry
from protocol.commands import BATCH, Alloc, Decode, Digest, Forward, PrefillChunk, Span, Wanted, Warm
from protocol.links import HeadLinks
from protocol.preamble import RECORD_ROUTING
from protocol.slots import SlotLimits, SlotTable

CPU = torch.device("cpu")
VOCAB, WIDTH, SLOTS = 20, 6, 4
SPEC = ModelSpec(
    architecture="Echo",
    family="echo",
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    num_layers=1,
    layer_kinds=(LayerKind.LINEAR,),
    caches=(),
    states=(StateSpec(layer=0, name="h", shape=(3,), dtype="float32"),),
    max_positions=60,
)


def recorded(tokens: Sequence[int]) -> ForwardOutput:
    """What a forward of these tokens has to show."""
    ids = torch.tensor(list(tokens))
    rows = ids[:, None].float().expand(-1, WIDTH)
    return ForwardOutput(
        logits=torch.zeros(len(tokens), VOCAB),
        routing=torch.stack((ids, ids + 1)).int()[:, :, None],
        inputs=rows.contiguous(),
        outputs=rows + 0.5,
    )


class Echo:
    """A model."""

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []

    def spec(self) -> ModelSpec:
        return SPEC

    def static_decode(self, block_size: int) -> bool:
        return False

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        raise AssertionError("not part of these tests")

    def forward(self, batch: ForwardBatch, state: StateRegistry, comm: Communicator) -> ForwardOutput:
        self.batches.append(batch)
        output = recorded(batch.token_ids.tolist())
        output.logits = torch.zeros(len(batch.wanted_rows), VOCAB)
        return output if batch.routing else ForwardOutput(logits=output.logits)


class Graphs:
    """Stands for captured steps, whose replays always record."""

    def __init__(self) -> None:
        self.replays = 0

    def bucket(self, rows: int) -> int:
        return rows

    def run(self, step: int, columns: Sequence[Sequence[int]]) -> ForwardOutput:
        self.replays += 1
        return recorded(columns[0])


class Rank:
    """A lone rank with two slots that have had their prompts."""

    def __init__(self) -> None:
        self.model = Echo()
        limits = SlotLimits(max_slots=SLOTS, num_blocks=40, block_size=16, max_length=60, max_rows=16)
        state = StateRegistry(SPEC, max_slots=SLOTS, num_blocks=40, block_size=16, dtype=torch.float32, device=CPU)
        self.executor = Executor(self.model, state, LoneRank(), limits, CPU, dtype=torch.float32)
        self.slots = SlotTable(limits)
        self.head = Broadcaster(self.executor, HeadLinks([], 0, lambda: False), self.slots, epoch=0, version=2, deadline_s=10.0)
        for slot in (0, 1):
            self.head.run(Alloc(token_budget=20, prompt_length=2), slot)
        prompts = [Span(slot, 0, 2, False, False, Wanted.NONE, [slot]) for slot in (0, 1)]
        self.head.run(PrefillChunk(spans=prompts), BATCH, tokens=[1, 2, 3, 4])

    def decode(self, tokens: list[int], flags: int) -> None:
        spans = []
        for slot in range(len(tokens)):
            state = self.slots[slot]
            assert state is not None
            spans.append(Span(slot, state.length, 1, False, True, Wanted.LAST, []))
        self.head.run(Decode(spans=spans), BATCH, tokens=tokens, choose=zeros, flags=flags)

    def sections(self) -> dict[str, str]:
        digest = self.executor.digest(self.slots)
        return dict(part.split("=") for part in digest.text.split())


def zeros(output: ForwardOutput, command: Forward) -> torch.Tensor:
    assert output.logits is not None
    assert len(output.logits) == len(command.spans)
    return torch.zeros(len(command.spans), dtype=torch.int64)


def low_half(tensor: torch.Tensor) -> str:
    return f"{mix([int(checksum(tensor))]) & 0xFFFFFFFF:08x}"


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_recorded_step_is_digested_where_it_ran(graph: bool) -> None:
    rank, graphs = Rank(), Graphs()
    if graph:
        rank.executor._graphs = graphs  # type: ignore[assignment]
    rank.decode([5, 6], 0)
    assert [rank.sections()[name] for name in ("routing", "inputs", "outputs", "rows")] == ["00000000"] * 4
    rank.decode([7, 8], RECORD_ROUTING)
    rank.decode([9, 10], 0)
    want = recorded([7, 8])
    assert want.routing is not None
    assert want.inputs is not None
    assert want.outputs is not None
    sections = rank.sections()
    assert list(sections) == ["slots", "lengths", "blocks", "h", "routing", "inputs", "outputs", "rows"]
    assert sections["routing"] == low_half(want.routing)
    assert sections["inputs"] == low_half(want.inputs)
    assert sections["outputs"] == low_half(want.outputs)
    assert (graphs.replays, len(rank.model.batches)) == ((3, 1) if graph else (0, 4))


def test_states_of_active_slots_alone_count() -> None:
    rank = Rank()
    base = rank.sections()
    h = rank.executor._state.recurrent(0, "h")
    h[3] += 1
    assert rank.sections() == base
    h[1, 2] += 1e-3
    assert {name for name, value in rank.sections().items() if value != base[name]} == {"h"}


def test_everything_is_launched_before_the_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, order = Rank(), []
    monkeypatch.setattr(rank.executor.comm, "settle", lambda: order.append("settle"))
    monkeypatch.setattr("ep_runtime.engine.digest.download", lambda tensor: order.append(f"copy of {len(tensor)}") or tensor)
    rank.decode([7, 8], RECORD_ROUTING)
    assert order == [], "a recorded step waits for nothing"
    rank.head.run(Digest(), BATCH)
    assert order == ["copy of 4", "settle"]


def test_warming_up_launches_what_a_digest_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, read = Rank(), []
    monkeypatch.setattr("ep_runtime.engine.executor.read_sums", lambda sums, comm: read.append(list(sums)) or read_sums(sums, comm))
    before = rank.sections()
    rank.head.run(Warm(buckets=[1, 2]), BATCH)
    assert read[1][0] == "h"
    assert rank.sections() == before
