"""An independent model of what ranks do with plans: the oracle of cache correctness for the scheduler's tests.

Each owner has its own cells. They hold (token, position, loops); where a prompt has an image, the token is a code of the image's
contents. A sampled token is a function of the tokens that attention reads through the block table, so a wrong block gives a wrong
token, besides failing an assertion here. With several loops it is also one of the loops that each row behind the prompt has run.
How many a new row runs is drawn, and drawn again if it is computed anew: only what was noted of it can give the same tokens.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from ep_runtime.scheduler.core import Plan, SpanResult, StepResult
from protocol.commands import Loops, Wanted
from protocol.messages import Submit, TokenLogprobs, VisionInput

VOCAB = 50
PLACEHOLDER = 49
"""In a prompt; a generated one is a token like any other."""


def next_token(prefix: list[int], depths: Sequence[int] = ()) -> int:
    """After these tokens; `depths` are the loops of the rows behind the prompt, for several loops."""
    return zlib.crc32(array("i", [*prefix, *depths]).tobytes()) % VOCAB


def several(message: Submit) -> Loops | None:
    """The loops of a request, when they are more than one."""
    loops = message.sampling.loops
    return loops if loops is not None and loops.most > 1 else None


def run_looped(prompt: list[int], depths: Sequence[int]) -> list[int]:
    """Generated tokens with several loops, one for each of `depths`: 0, then the loops of each row behind the prompt."""
    tokens = list(prompt)
    for count in range(1, len(depths) + 1):
        tokens.append(next_token(tokens, depths[:count]))
    return tokens[len(prompt) :]


def run_alone(prompt: list[int], max_tokens: int, stops: frozenset[int], min_tokens: int = 0) -> tuple[list[int], str]:
    """Generated tokens and finish reason of a request that has the device to itself."""
    tokens = list(prompt)
    for count in range(1, max_tokens + 1):
        tokens.append(next_token(tokens))
        if count >= min_tokens and tokens[-1] in stops:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


def prompt_logprob(prefix: list[int], token: int) -> TokenLogprobs:
    return TokenLogprobs(-(zlib.crc32(array("i", [*prefix, token]).tobytes()) % 997) / 10, 1, [], [])


def code(image: VisionInput, position: int) -> int:
    """What stands for one row of an image: never a token."""
    return VOCAB + zlib.crc32(image.digest + (position - image.start).to_bytes(4, "little")) % 2**30


def rendered(message: Submit) -> list[int]:
    """The prompt with its images in place of their placeholders."""
    prompt = list(message.prompt)
    for image in message.images:
        for position in range(image.start, image.start + image.rows):
            assert prompt[position] == PLACEHOLDER
            prompt[position] = code(image, position)
    return prompt


class CommandFailed(Exception):
    pass


@dataclass
class Slot:
    budget: int
    table: list[int]
    length: int
    shared: int
    last: int | None = None
    poisoned: bool = False
    request_id: str = ""
    owner: int = 0
    loops: Loops | None = None
    depths: list[int] = field(default_factory=list)
    """With loops: 0 for the prompt, then those of each row behind it."""
    images: dict[int, VisionInput] = field(default_factory=dict)
    """By position, those whose rows are held."""


@dataclass
class FakeDevice:
    max_slots: int
    num_blocks: int
    block_size: int
    max_rows: int
    evil: frozenset[str] = frozenset()
    """Requests whose forwards fail."""
    messages: dict[str, Submit] = field(default_factory=dict)
    """By request, for its images, and for prompt logprobs: the row before a chunk's end is scored against the token after it."""
    max_image_tokens: int = 0
    owners: int = 1
    slots: list[Slot | None] = field(init=False)
    cells: dict[tuple[int, int], list[tuple[int, int, Loops | None] | None]] = field(init=False)
    """By owner and block."""
    steps: int = 0
    exits: Random = field(default_factory=lambda: Random(0))
    flaky: float = 0.0
    """How probable it is that a forward fails, whoever is in it."""

    def __post_init__(self) -> None:
        self.slots = [None] * self.max_slots
        self.cells = {}

    def move_slots(self, plan: Plan) -> None:
        """The plan's FREEs and ALLOCs."""
        assert len(set(plan.frees)) == len(plan.frees)
        for slot in plan.frees:
            self.slots[slot] = None
        for alloc in plan.allocs:
            assert self.slots[alloc.slot] is None, f"ALLOC of slot {alloc.slot}, which is in use"
            assert alloc.prefix_length == len(alloc.prefix_blocks) * self.block_size
            assert alloc.token_budget >= 1
            assert alloc.owner == alloc.slot % self.owners, f"slot {alloc.slot} is given to owner {alloc.owner}"
            self.slots[alloc.slot] = Slot(
                alloc.token_budget,
                list(alloc.prefix_blocks),
                alloc.prefix_length,
                alloc.prefix_length,
                request_id=alloc.request_id,
                owner=alloc.owner,
            )
            self._show(self.slots[alloc.slot], alloc)
            self.slots[alloc.slot].loops = several(self.messages[alloc.request_id])
            assert alloc.loops == self.slots[alloc.slot].loops
            assert alloc.loops is None or not alloc.prefix_length, "a prefix cannot stand for loops"
        held = sum(len(slot.images) for slot in self.slots if slot is not None)
        assert held <= self.max_image_tokens, f"{held} rows of images are held"

    def _show(self, slot, alloc) -> None:
        """VISION: the images that the prefix has not are held until the length has passed the last one."""
        message = self.messages[alloc.request_id]
        assert alloc.prompt_length == len(message.prompt)
        images = [(image.start, image.rows, image.digest) for image in message.images]
        assert [(image.start, image.rows, image.digest) for image in alloc.images] == images
        for index, image in enumerate(message.images):
            if index < alloc.skipped:
                assert image.start + image.rows <= slot.length, "a skipped image is not in the prefix"
            else:
                assert image.start >= slot.length, "an image is cut by the prefix"
                slot.images |= dict.fromkeys(range(image.start, image.start + image.rows), image)

    def execute(self, plan: Plan) -> StepResult:
        """The whole plan; CommandFailed (and poisoned slots) when it names an evil request or a poisoned slot."""
        self.steps += 1
        self.move_slots(plan)
        named = [span.slot for span in plan.spans]
        assert len(set(named)) == len(named), "a slot is named twice"
        assert sum(span.length for span in plan.spans) <= self.max_rows, "the token budget is exceeded"
        assert len(plan.owners) == len(plan.spans) == len(plan.indices)
        slots = [self.slots[slot] for slot in named]
        for slot, owner in zip(slots, plan.owners, strict=True):
            assert slot is not None, "a span names an EMPTY slot"
            assert slot.request_id == owner
        for span, owner, index in zip(plan.spans, plan.owners, plan.indices, strict=True):
            assert not span.sampled or len(self.messages[owner].prompt) + index == span.start + span.length
        flaked = bool(slots) and self.exits.random() < self.flaky
        if any(slot.poisoned for slot in slots) or self.evil.intersection(plan.owners) or flaked:
            for slot in slots:
                slot.poisoned = True
            raise CommandFailed
        given = list(plan.tokens)
        # All writes come before all reads, as in one layer of a forward.
        for slot, span in zip(slots, plan.spans, strict=True):
            self._write(slot, span, given)
        assert not given, "the plan carries tokens that no span takes"
        return StepResult(plan=plan, spans=tuple(self._read(slot, span) for slot, span in zip(slots, plan.spans, strict=True)))

    def _write(self, slot, span, given) -> None:
        assert span.start == slot.length, "a span does not start at the slot's length"
        assert span.start + span.length <= slot.budget
        slot.table += span.new_blocks
        count = span.length - (1 if span.fed else 0)
        rows, given[:count] = given[:count], []
        if span.fed:
            assert slot.last is not None, "fed, but the last row sampled nothing"
            rows = [slot.last, *rows]
        if slot.loops is not None:
            self._loop(slot, span)
        else:
            assert span.depth == 0, "the loops of a row of one"
        mine = [other for other in self.slots if other is not None and other.owner == slot.owner]
        others = {block for other in mine if other is not slot for block in other.table}
        for position, token in enumerate(rows, span.start):
            block = slot.table[position // self.block_size]
            assert block not in others, f"block {block} is shared and written"
            assert position >= slot.shared
            message = self.messages[slot.request_id]
            if message.images and position < len(message.prompt):
                image = slot.images.get(position)
                assert (token == PLACEHOLDER) == (image is not None), f"position {position} has token {token}, and {image}"
                token = token if image is None else code(image, position)
            assert 0 <= block < self.num_blocks
            cells = self.cells.setdefault((slot.owner, block), [None] * self.block_size)
            cells[position % self.block_size] = (token, position, slot.loops)
        slot.length += span.length
        if slot.images and max(slot.images) < slot.length:
            slot.images = {}
        assert len(slot.table) == -(-slot.length // self.block_size), "blocks are sent early or late"
        slot.last = None

    def _loop(self, slot, span) -> None:
        """The prompt is one piece, the rows behind it come one by one: replayed, not sampled, up to the last known token."""
        prompt, loops = len(self.messages[slot.request_id].prompt), slot.loops
        if span.start < prompt:
            assert (span.start, span.length, span.depth) == (0, prompt, 0), "a prompt of several loops is cut"
            slot.depths = [0]
            return
        assert span.length == 1, "rows of several loops in one piece"
        assert not (span.fed and span.depth), "a row that is new has run before"
        assert not (span.sampled and span.depth), "a row whose next token is known is sampled"
        assert span.sampled or 1 <= span.depth <= loops.most, "a replayed row has lost its loops"
        drawn = self.exits.randint(1, loops.most) if loops.thresholds else loops.most
        slot.depths.append(span.depth or drawn)

    def _read(self, slot, span) -> SpanResult:
        prefix = []
        for position in range(slot.length):
            cell = self.cells[slot.owner, slot.table[position // self.block_size]][position % self.block_size]
            assert cell is not None
            assert cell[1] == position, f"position {position} reads what was written for {cell[1]}"
            assert cell[2] == slot.loops, f"position {position} is of {cell[2]}, not {slot.loops}"
            prefix.append(cell[0])
        token = None
        if span.sampled:
            assert span.wanted in (Wanted.LAST, Wanted.ALL)
            token = slot.last = next_token(prefix, slot.depths)
        depth = slot.depths[-1] if slot.depths else 0
        if span.wanted is not Wanted.ALL:
            return SpanResult(token=token, depth=depth)
        prompt = self.messages[slot.request_id].prompt
        ends = range(span.start + 1, min(slot.length + 1, len(prompt)))
        scores = [prompt_logprob(prefix[:end], prompt[end]) for end in ends]
        return SpanResult(token=token, prompt_start=span.start + 1, prompt_logprobs=scores, depth=depth)
