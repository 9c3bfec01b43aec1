"""Images in the executor of a lone rank: what a forward gets, what is refused before it, and how long rows live."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ep_runtime.engine.broadcast import Broadcaster
from ep_runtime.engine.epoch import LoneRank
from ep_runtime.engine.executor import Executor
from model.base import Communicator
from model.batch import ForwardBatch, ForwardOutput
from model.spec import ModelSpec, VisionSpec
from model.state.registry import StateRegistry
from protocol.commands import BATCH, Alloc, Body, Copy, Decode, Digest, Forward, Free, Ping, Span, Vision, VisionGrid, Wanted
from protocol.commands import forward_command as command_of
from protocol.errors import EpCommandFailed, EpDiverged
from protocol.links import HeadLinks
from protocol.preamble import RECORD_ROUTING
from protocol.sections import unpack_sections
from protocol.slots import SlotLimits, SlotStatus, SlotTable, check_integrity

IMAGE, VIDEO, TEXT = 90, 91, 7
WIDTH, HIDDEN, VOCAB, SIZE = 6, 4, 100, 4
CPU = torch.device("cpu")
LIMITS = SlotLimits(max_slots=4, num_blocks=64, block_size=SIZE, max_length=60, max_rows=64, max_vision_rows=60)


class Recorder:
    """A model that keeps its batches, and whose hidden states entering layer 0 tell tokens and rows."""

    def __init__(self, vision: bool = True) -> None:
        self.batches: list[ForwardBatch] = []
        self.fails = False
        self._vision = VisionSpec(placeholders=(IMAGE, VIDEO), patch=4, merge=2, frames=2, row_width=WIDTH) if vision else None

    def spec(self) -> ModelSpec:
        return ModelSpec(
            architecture="Recorder",
            family="recorder",
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_layers=0,
            layer_kinds=(),
            caches=(),
            max_positions=60,
            vision=self._vision,
        )

    def static_decode(self, block_size: int) -> bool:
        return False

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        x = batch.token_ids[:, None].float().repeat(1, HIDDEN)
        if batch.inserted is not None:
            x[batch.inserted.rows] = batch.inserted.values[:, :HIDDEN]
        return x

    def forward(self, batch: ForwardBatch, state: StateRegistry, comm: Communicator) -> ForwardOutput:
        self.batches.append(batch)
        if self.fails:
            raise ValueError("this forward fails")
        inputs = self.embed(batch) if batch.routing else None
        return ForwardOutput(logits=torch.zeros(len(batch.wanted_rows), VOCAB), inputs=inputs)


class Lone(LoneRank):
    """A lone rank whose next broadcast may fail."""

    fails = False

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.fails:
            raise ValueError("this broadcast fails")


class Rank:
    """One rank's executor, driven by the commands that a head would send."""

    def __init__(self, *, vision: bool = True, limits: SlotLimits = LIMITS) -> None:
        self.model, self.comm, self.limits = Recorder(vision), Lone(), limits
        state = StateRegistry(self.model.spec(), max_slots=4, num_blocks=64, block_size=SIZE, dtype=torch.float32, device=CPU)
        self.executor = Executor(self.model, state, self.comm, limits, CPU, dtype=torch.float32)
        self.slots = SlotTable(limits)
        links = HeadLinks([], 0, lambda: False)
        self.head = Broadcaster(self.executor, links, self.slots, epoch=0, version=2, deadline_s=10.0)
        self._free = list(range(64))

    def run(self, command: Body, seq_id: int = BATCH, **options: Any) -> None:
        try:
            self.head.run(command, seq_id, **options)
        finally:
            check_integrity(self.slots, self.limits)
            self.executor.rows.check_integrity(self.slots)

    def show(self, slot: int, grids: list[VisionGrid], skipped: int = 0, seed: int = 0) -> torch.Tensor:
        """VISION with random rows, which are returned."""
        count = sum(grid.height * grid.width for grid in grids[skipped:])
        rows = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
        if count:
            self.executor.offer_rows(rows)
        self.run(Vision(grids=grids, rows=count, skipped=skipped), slot)
        return rows

    def span(self, slot: int, length: int, *, fed: bool = False) -> Span:
        state = self.slots[slot]
        start, held = (0, 0) if state is None else (state.length, len(state.blocks))
        new = max(0, -(-(start + length) // SIZE) - held)
        blocks = [self._free.pop(0) for _ in range(new)]
        return Span(slot, start, length, fed, True, Wanted.LAST, blocks)

    def forward(self, spans: list[Span], tokens: list[int], flags: int = 0) -> ForwardBatch:
        self.run(command_of(spans), tokens=tokens, choose=_sampled, flags=flags)
        return self.model.batches[-1]

    def sections(self) -> dict[str, str]:
        return unpack_sections(self.executor.digest(self.slots).text)


def _sampled(output: ForwardOutput, command: Forward) -> torch.Tensor:
    return torch.full((sum(span.sampled for span in command.spans),), TEXT)


def prompt_of(length: int, grids: list[VisionGrid]) -> list[int]:
    """TEXT, and placeholders in the grids: of images in the first, of videos in the others."""
    tokens = [TEXT] * length
    for number, grid in enumerate(grids):
        for place in range(grid.start, min(grid.stop, length)):
            tokens[place] = VIDEO if number else IMAGE
    return tokens


def positions_of(length: int, grids: list[VisionGrid]) -> np.ndarray:
    """`[3, length]`, one row after another, as the paper of Qwen2-VL has it: text goes on after the largest position so far."""
    parts: list[list[int]] = []
    largest = -1
    starts = {grid.start: grid for grid in grids}
    while len(parts) < length:
        grid = starts.get(len(parts))
        base = largest + 1
        if grid is None:
            parts.append([base] * 3)
        else:
            parts += [[base, base + row, base + column] for row in range(grid.height) for column in range(grid.width)]
        largest = max(max(part) for part in parts)
    return np.array(parts[:length]).T


def started(rank: Rank, slot: int, length: int, grids: list[VisionGrid], budget: int = 60) -> torch.Tensor:
    rank.run(Alloc(token_budget=budget, prompt_length=length), slot)
    return rank.show(slot, grids, seed=slot)


A, B, C = VisionGrid(2, 2, 3), VisionGrid(8, 1, 4), VisionGrid(15, 3, 2)
"""Positions 2 to 7, right behind it 8 to 11, and 15 to 20."""


def test_chunks_take_the_rows_they_need_wherever_their_borders_are() -> None:
    random_of = random.Random(3)
    for _ in range(40):
        rank = Rank()
        prompts = {}
        for slot, grids in enumerate([[A, B, C], [B], [], [VisionGrid(0, 2, 2), VisionGrid(20, 1, 3)]]):
            rank.run(Alloc(token_budget=40, prompt_length=23), slot)
            rows = rank.show(slot, grids, seed=slot) if grids else torch.empty(0, WIDTH)
            prompts[slot] = (prompt_of(23, grids), positions_of(40, grids), rows, grids)
        lengths = dict.fromkeys(prompts, 0)
        while any(length < 23 for length in lengths.values()):
            due = [slot for slot in prompts if lengths[slot] < 30 and random_of.random() < 0.7]
            spans: list[Span] = []
            tokens: list[int] = []
            expected: list[np.ndarray] = []
            inserted: list[tuple[int, torch.Tensor]] = []
            for slot in due:
                left = 23 - lengths[slot]
                size = random_of.randint(1, min(9, left)) if left > 0 else 1
                spans.append(rank.span(slot, size, fed=left <= 0))
                for place in range(lengths[slot], lengths[slot] + size):
                    in_image = [grid for grid in prompts[slot][3] if grid.start <= place < grid.stop]
                    if in_image:
                        before = sum(grid.stop - grid.start for grid in prompts[slot][3] if grid.stop <= place)
                        inserted.append((len(expected), prompts[slot][2][before + place - in_image[0].start]))
                    expected.append(prompts[slot][1][:, place])
                if left > 0:
                    tokens += prompts[slot][0][lengths[slot] : lengths[slot] + size]
                lengths[slot] += size
            if not spans:
                continue
            batch = rank.forward(spans, tokens)
            found = batch.positions.numpy()
            assert (np.broadcast_to(found, (3, len(expected))) == np.array(expected).T).all()
            if not inserted:
                assert batch.inserted is None
                continue
            assert batch.inserted is not None
            assert batch.inserted.rows.tolist() == [row for row, _ in inserted]
            assert torch.equal(batch.inserted.values, torch.stack([value for _, value in inserted]))
        assert rank.executor.rows.nbytes == 0


def test_steps_behind_the_images_have_one_position_a_row() -> None:
    rank = Rank()
    started(rank, 0, 21, [A, B, C])
    rank.run(Alloc(token_budget=60, prompt_length=3), 1)
    assert rank.forward([rank.span(1, 3)], [TEXT] * 3).positions.tolist() == [0, 1, 2]
    assert rank.forward([rank.span(0, 20)], prompt_of(20, [A, B, C])).positions.shape == (3, 20)
    # One row of an image, in a step of single rows.
    batch = rank.forward([rank.span(0, 1), rank.span(1, 1, fed=True)], [VIDEO])
    assert batch.positions.T.tolist() == [positions_of(21, [A, B, C])[:, 20].tolist(), [3, 3, 3]]
    behind = positions_of(30, [A, B, C])[0]
    batch = rank.forward([rank.span(0, 1, fed=True), rank.span(1, 1, fed=True)], [])
    assert batch.positions.tolist() == [behind[21], 4]
    batch = rank.forward([rank.span(0, 3), rank.span(1, 1, fed=True)], [TEXT, IMAGE, TEXT])
    assert batch.positions.tolist() == [*behind[22:25].tolist(), 5]
    assert batch.inserted is None


def test_text_after_an_image_in_the_same_slot_has_plain_positions() -> None:
    rank = Rank()
    started(rank, 0, 21, [A, B, C])
    rank.forward([rank.span(0, 9)], prompt_of(9, [A, B, C]))
    rank.run(Free(), 0)
    assert rank.executor.rows.nbytes == 0
    rank.run(Alloc(token_budget=20, prompt_length=9), 0)
    batch = rank.forward([rank.span(0, 9)], [TEXT] * 9)
    assert (batch.positions.tolist(), batch.inserted) == (list(range(9)), None)


def test_skipped_grids_move_positions_and_have_no_rows() -> None:
    rank = Rank()
    rank.run(Alloc(token_budget=30, prompt_length=21), 0)
    rank.forward([rank.span(0, 12)], [TEXT] * 12)
    rank.run(Alloc(token_budget=30, prompt_length=21, prefix_length=12, prefix_blocks=[0, 1, 2]), 1)
    rows = rank.show(1, [A, B, C], skipped=2)
    batch = rank.forward([rank.span(1, 7)], prompt_of(21, [A, B, C])[12:19])
    assert (batch.positions.numpy() == positions_of(19, [A, B, C])[:, 12:]).all()
    assert batch.inserted is not None
    assert (batch.inserted.rows.tolist(), torch.equal(batch.inserted.values, rows[:4])) == ([3, 4, 5, 6], True)
    rank.run(Alloc(token_budget=30, prompt_length=14, prefix_length=12, prefix_blocks=[0, 1, 2]), 2)
    rank.show(2, [A, B], skipped=2)
    batch = rank.forward([rank.span(2, 2)], [TEXT] * 2)
    assert batch.positions.tolist() == positions_of(14, [A, B])[0, 12:].tolist()


def test_a_copy_goes_on_behind_its_images() -> None:
    rank = Rank()
    started(rank, 0, 12, [A, B])
    rank.forward([rank.span(0, 12)], prompt_of(12, [A, B]))
    rank.run(Copy(source=0, length=12, token_budget=30, shared_blocks=[0, 1, 2]), 1)
    batch = rank.forward([rank.span(1, 1)], [IMAGE])
    assert batch.positions.tolist() == [positions_of(13, [A, B])[0, 12]]


REFUSED: dict[str, tuple[list[int], str]] = {
    "a placeholder in text": ([TEXT, IMAGE, *[IMAGE] * 6], "position 1 of slot 0 has a placeholder, and no row"),
    "text in an image": ([TEXT, TEXT, IMAGE, IMAGE, TEXT, *[IMAGE] * 3], "position 4 of slot 0 is an image's, its token is no"),
    "an image that is too short": ([TEXT, TEXT, *[IMAGE] * 5, TEXT], "position 7 of slot 0 is an image's"),
}


@pytest.mark.parametrize(("tokens", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_tokens_that_do_not_fit_the_images_are_refused_before_anything_changes(tokens: list[int], named: str) -> None:
    rank = Rank()
    started(rank, 0, 21, [A, C])
    before = rank.sections()
    span = rank.span(0, len(tokens))
    with pytest.raises(EpCommandFailed, match=named):
        rank.forward([span], tokens)
    assert (rank.sections(), rank.model.batches) == (before, [])
    rank.forward([span], prompt_of(8, [A]))


def test_a_placeholder_of_a_prompt_needs_a_row_and_a_generated_one_does_not() -> None:
    rank = Rank()
    for placeholder in (IMAGE, VIDEO):
        rank.run(Alloc(token_budget=20, prompt_length=5), 1)
        span = rank.span(1, 6)
        with pytest.raises(EpCommandFailed, match="position 4 of slot 1 has a placeholder, and no row of an image"):
            rank.forward([span], [TEXT] * 4 + [placeholder] * 2)
        batch = rank.forward([span], [TEXT] * 5 + [placeholder])
        assert batch.inserted is None
        rank.run(Free(), 1)


def test_each_slot_is_held_to_its_own_images() -> None:
    rank = Rank()
    started(rank, 0, 21, [A, C])
    rank.run(Alloc(token_budget=20, prompt_length=5), 1)
    spans = [rank.span(1, 2), rank.span(0, 4)]
    with pytest.raises(EpCommandFailed, match="position 1 of slot 1 has a placeholder"):
        rank.forward(spans, [TEXT, IMAGE, TEXT, TEXT, IMAGE, IMAGE])
    with pytest.raises(EpCommandFailed, match="position 0 of slot 0 has a placeholder"):
        rank.forward(spans, [TEXT, TEXT, IMAGE, TEXT, IMAGE, IMAGE])
    rank.forward(spans, [TEXT, TEXT, TEXT, TEXT, IMAGE, IMAGE])
    with pytest.raises(EpCommandFailed, match="MIXED: position 4 of slot 0 is an image's, its token is fed"):
        rank.forward([rank.span(0, 2, fed=True)], [IMAGE])


def test_rows_that_are_not_here_although_the_table_has_them_end_the_epoch() -> None:
    rank = Rank()
    started(rank, 0, 21, [A, C])
    rank.executor.rows.drop(0)
    with pytest.raises(RuntimeError, match="slot 0 holds 0 rows of images, the table says 12"):
        rank.executor.rows.check_integrity(rank.slots)
    with pytest.raises(Exception, match="EpDiverged: rank 0 holds 0 rows of the images of slot 0, not 12"):
        rank.head.run(Decode(spans=[rank.span(0, 1)]), BATCH, tokens=[TEXT], choose=_sampled)
    assert rank.model.batches == []
    with pytest.raises(EpDiverged):
        rank.executor.rows.check_held([Span(0, 0, 1, False, False, Wanted.NONE, [])], rank.slots, 0)


OFFERS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "too wide": (lambda: torch.zeros(6, WIDTH + 1), r"\(6, 7\) torch.float32 on cpu, due are \[n, 6\]"),
    "another dtype": (lambda: torch.zeros(6, WIDTH, dtype=torch.bfloat16), "bfloat16"),
    "flat": (lambda: torch.zeros(6 * WIDTH), r"\(36,\)"),
    "no shape at all": (lambda: torch.zeros(()), r"\(\)"),
    "another device": (lambda: torch.zeros(6, WIDTH, device="meta"), "on meta, due"),
}


@pytest.mark.parametrize(("rows", "named"), OFFERS.values(), ids=OFFERS.keys())
def test_rows_of_another_layout_cannot_be_offered(rows: Callable[[], torch.Tensor], named: str) -> None:
    rank = Rank()
    with pytest.raises(ValueError, match=named):
        rank.executor.offer_rows(rows())
    rank.run(Ping())


def test_a_vision_without_its_rows_on_offer_is_not_sent() -> None:
    rank = Rank()
    rank.run(Alloc(token_budget=20, prompt_length=14), 0)
    step, before = rank.head.step, rank.sections()
    for offered in (None, 5, 7):
        if offered is not None:
            rank.executor.offer_rows(torch.zeros(offered, WIDTH))
        with pytest.raises(EpCommandFailed, match=f"{offered or 0} rows of images are on offer, the command takes 6"):
            rank.run(Vision(grids=[A], rows=6), 0)
    rank.executor.offer_rows(torch.zeros(6, WIDTH))
    with pytest.raises(EpCommandFailed, match="6 rows of images are on offer, the command takes 0"):
        rank.run(Ping())
    assert (rank.head.step, rank.sections()) == (step, before)
    rank.show(0, [A])


def test_a_refused_vision_reserves_nothing_and_takes_the_offer() -> None:
    rank = Rank()
    rank.run(Alloc(token_budget=20, prompt_length=14), 0)
    for grids, count in [([VisionGrid(2, 2, 3)], 5), ([VisionGrid(12, 1, 3)], 3)]:
        rank.executor.offer_rows(torch.zeros(count, WIDTH))
        with pytest.raises(EpCommandFailed, match="voted down: rank 0: COMMAND after 0 collectives: preparing"):
            rank.run(Vision(grids=grids, rows=count), 0)
    assert rank.executor.rows.nbytes == 0
    rank.show(0, [A])


def test_no_memory_is_a_vote_against(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    rank.run(Alloc(token_budget=20, prompt_length=14), 0)
    before = rank.sections()

    def full(rows: int) -> None:
        raise torch.OutOfMemoryError("out of memory: tried to allocate rows")

    with monkeypatch.context() as patch:
        patch.setattr(rank.executor.rows, "reserve", full)
        with pytest.raises(EpCommandFailed, match="voted down: rank 0: OUT_OF_MEMORY"):
            rank.show(0, [A])
    assert rank.sections() == before
    rank.show(0, [A])


def test_a_vision_that_fails_leaves_the_slot_as_it_was() -> None:
    rank = Rank()
    rank.run(Alloc(token_budget=20, prompt_length=14), 0)
    before = rank.sections()
    rank.comm.fails = True
    with pytest.raises(EpCommandFailed, match="this broadcast fails"):
        rank.show(0, [A])
    rank.comm.fails = False
    assert (rank.sections(), rank.executor.rows.nbytes, rank.executor.rows.shifts) == (before, 0, [0] * 4)
    rank.show(0, [A])
    rank.forward([rank.span(0, 14)], prompt_of(14, [A]))


def test_rows_go_with_the_last_image_also_when_that_forward_fails() -> None:
    rank = Rank()
    started(rank, 0, 14, [A])
    rank.forward([rank.span(0, 4)], prompt_of(4, [A]))
    assert rank.executor.rows.nbytes == 6 * WIDTH * 4
    rank.model.fails = True
    with pytest.raises(EpCommandFailed, match="this forward fails"):
        rank.forward([rank.span(0, 5)], prompt_of(9, [A])[4:])
    state = rank.slots[0]
    assert state is not None
    assert (state.status, rank.executor.rows.nbytes) == (SlotStatus.POISONED, 0)
    rank.run(Free(), 0)
    assert rank.executor.rows.shifts == [0] * 4


def test_the_epochs_end_drops_rows() -> None:
    rank = Rank()
    started(rank, 0, 14, [A])
    rank.executor.close()
    assert (rank.executor.rows.nbytes, rank.executor.rows.shifts) == (0, [0] * 4)


def test_rows_are_a_copy_of_the_heads() -> None:
    rank = Rank()
    rows = started(rank, 0, 14, [A])
    kept = rows.clone()
    rows.zero_()
    batch = rank.forward([rank.span(0, 14)], prompt_of(14, [A]))
    assert batch.inserted is not None
    assert torch.equal(batch.inserted.values, kept)


def test_digests_tell_inputs_and_rows() -> None:
    rank, other = Rank(), Rank()
    for one in (rank, other):
        started(one, 0, 14, [A])
    assert rank.sections() == other.sections()
    held = other.executor.rows.held(0)
    assert held is not None
    held[3, 2] += 1e-3
    differing = {name for name, value in rank.sections().items() if other.sections()[name] != value}
    assert differing == {"rows"}
    for one in (rank, other):
        one.forward([one.span(0, 14)], prompt_of(14, [A]), flags=RECORD_ROUTING)
        one.run(Digest())
    differing = {name for name, value in rank.sections().items() if other.sections()[name] != value}
    assert differing == {"inputs"}
    assert rank.sections()["rows"] == "00000000"


class Graphs:
    """Stands for captured steps of up to four rows; keeps the columns of its replays."""

    def __init__(self) -> None:
        self.columns: list[np.ndarray] = []

    def bucket(self, rows: int) -> str | None:
        return "step" if rows <= 4 else None

    def run(self, step: str, columns: np.ndarray) -> ForwardOutput:
        self.columns.append(columns)
        return ForwardOutput(logits=torch.zeros(len(columns[0]), VOCAB))


def test_graphs_get_shifted_positions_and_no_row_of_an_image() -> None:
    rank, graphs = Rank(), Graphs()
    started(rank, 0, 8, [A])
    rank.executor._graphs = graphs  # type: ignore[assignment]
    rank.run(Alloc(token_budget=20, prompt_length=2), 1)
    rank.forward([rank.span(0, 7), rank.span(1, 2)], prompt_of(7, [A]) + [TEXT] * 2)
    batch = rank.forward([rank.span(0, 1), rank.span(1, 1, fed=True)], [IMAGE])
    assert graphs.columns == []
    assert batch.inserted is not None
    assert batch.inserted.rows.tolist() == [0]
    rank.forward([rank.span(0, 1, fed=True), rank.span(1, 1, fed=True)], [])
    ((given, fed, position, slot, length, place, owner),) = [columns.tolist() for columns in graphs.columns]
    assert (given, fed, slot, length, owner) == ([0, 0], [0, 1], [0, 1], [9, 4], [0, 0])
    assert position == [positions_of(9, [A])[0, 8], 3]
    assert [number % SIZE for number in place] == [0, 3]


def test_a_model_without_images_refuses_them_and_knows_no_placeholders() -> None:
    rank = Rank(vision=False, limits=replace(LIMITS, max_vision_rows=0))
    rank.run(Alloc(token_budget=20, prompt_length=14), 0)
    batch = rank.forward([rank.span(0, 3)], [IMAGE, VIDEO, TEXT])
    assert (batch.positions.tolist(), batch.inserted) == ([0, 1, 2], None)
    with pytest.raises(EpCommandFailed, match="this model takes no images"):
        rank.run(Vision(grids=[VisionGrid(0, 1, 1)], rows=0, skipped=1), 0)
    with pytest.raises(ValueError, match=r"due are \[n, 0\]"):
        rank.executor.offer_rows(torch.zeros(1, WIDTH))


def test_integrity_of_rows_names_what_is_wrong() -> None:
    rank = Rank()
    started(rank, 0, 14, [A])
    rows = rank.executor.rows
    rows.shifts[0] += 1
    with pytest.raises(RuntimeError, match="images of slot 0 shift positions by -3, not by -2"):
        rows.check_integrity(rank.slots)
    rows.shifts[0] -= 1
    rows.reserve(1)
    with pytest.raises(RuntimeError, match="reserved or on offer between commands"):
        rows.check_integrity(rank.slots)
    rows.release()
    rows._held[0] = rows._held[0].double()
    with pytest.raises(RuntimeError, match=r"rows of images of slot 0: \(6, 6\) torch.float64"):
        rows.check_integrity(rank.slots)
