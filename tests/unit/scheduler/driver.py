"""Drives a scheduler against the fake device as the head loop does, checking every law after every call."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from fake_device import CommandFailed, FakeDevice, prompt_logprob, rendered, run_alone, run_looped, several

from ep_runtime.engine.vision.cache import EncodedImages
from ep_runtime.scheduler.core import Plan, SchedulerLimits, StepResult
from ep_runtime.scheduler.owner import Owner
from ep_runtime.scheduler.scheduler import Scheduler
from ep_runtime.scheduler.slots import SlotState
from protocol.commands import Span
from protocol.messages import SamplingParams, SequenceUpdate, Submit, VisionInput
from protocol.vision import pixel_digest


def limits(**changes) -> SchedulerLimits:
    values = {
        "max_slots": 4,
        "num_blocks": 32,
        "block_size": 4,
        "max_model_len": 64,
        "max_batch_tokens": 16,
        "max_queue": 1000,
    }
    return SchedulerLimits(**{**values, **changes})


def request(request_id: str, prompt: list[int], max_tokens: int = 4, **changes) -> Submit:
    names = ("group", "priority", "generated", "adapter", "suspicions", "images", "depths")
    message = {name: changes.pop(name) for name in names if name in changes}
    message.setdefault("group", request_id)
    return Submit(
        request_id=request_id, prompt=prompt, sampling=SamplingParams(seed=0, max_tokens=max_tokens, **changes), **message
    )


def picture(start: int, rows: int, contents: int = 0) -> VisionInput:
    """An image of `rows` placeholder tokens; equal contents and rows make equal images."""
    digest = pixel_digest((1, 1, rows), contents.to_bytes(4, "little"))
    return VisionInput(start=start, height=1, width=rows, frames=1, digest=digest, pixels=b"")


@dataclass
class Rows:
    """In the place of a tensor: `n` rows of one byte."""

    n: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, 1

    @property
    def nbytes(self) -> int:
        return self.n


@dataclass
class Answer:
    """What the client of one request has seen."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    final: SequenceUpdate | None = None
    prompt_logprobs: dict[int, object] = field(default_factory=dict)
    cached: int = 0


class Driver:
    """One scheduler, one device, and up to `depth` launched plans beyond the one whose results are read next.

    Images are encoded one at a time, into a cache of `cache_rows` rows; those whose digests are in `unfit` cannot be.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        depth: int = 1,
        evil: frozenset[str] = frozenset(),
        check: bool = True,
        cache_rows: int | None = None,
        unfit: frozenset[bytes] = frozenset(),
    ) -> None:
        self.limits = limits
        self.depth = depth
        self.check = check
        self.scheduler = Scheduler(limits)
        self.device = FakeDevice(limits.max_slots, limits.num_blocks, limits.block_size, limits.max_batch_tokens, evil)
        self.device.max_image_tokens = limits.max_image_tokens
        self.device.owners = limits.owners
        self.encoded = EncodedImages(limits.max_image_tokens if cache_rows is None else cache_rows, 1)
        self.unfit = unfit
        self.encodings: list[tuple[str, bytes]] = []
        self.queue: deque[tuple[Plan, StepResult | None]] = deque()
        self.messages: dict[str, Submit] = {}
        self.answers: dict[str, Answer] = {}
        self.plans: list[Plan] = []
        self.masks: dict[str, int] = {}
        self.owed: dict[str, int] = {}

    def submit(self, message: Submit) -> SequenceUpdate | None:
        self.messages[message.request_id] = message
        self.device.messages[message.request_id] = message
        self.answers[message.request_id] = Answer()
        if message.sampling.grammar:
            self.masks[message.request_id] = len(message.generated)
        update = self.scheduler.submit(message)
        self.take([update] if update is not None else [])
        return update

    def give_mask(self, request_id: str) -> None:
        """The mask that the request asked for with its last token."""
        index = self.owed.pop(request_id)
        self.scheduler.allow(request_id, index)
        self.masks[request_id] = index
        self.take([])

    def give_masks(self) -> bool:
        """All masks that are owed; False when none is."""
        owed = list(self.owed)
        for request_id in owed:
            self.give_mask(request_id)
        return bool(owed)

    def abort(self, *request_ids: str) -> None:
        self.scheduler.abort(request_ids)
        self.take(self.scheduler.drain_updates())

    def take(self, updates: list[SequenceUpdate]) -> None:
        """Give updates to their clients; check the scheduler's books."""
        for update in updates:
            answer = self.answers[update.request_id]
            assert answer.final is None, f"{update.request_id} gets an update after its terminal one"
            answer.tokens += update.tokens
            answer.depths += update.depths
            looped = several(self.messages[update.request_id]) is not None
            assert len(update.depths) == len(update.tokens) * looped, "depths are not those of the tokens"
            for index, entry in enumerate(update.prompt_logprobs or []):
                position = update.prompt_start + index
                assert position not in answer.prompt_logprobs
                answer.prompt_logprobs[position] = entry
            answer.cached += update.cached
            if update.finish is not None:
                answer.final = update
                self.owed.pop(update.request_id, None)
            elif update.tokens and update.request_id in self.masks:
                self.owed[update.request_id] = len(self.messages[update.request_id].generated) + len(answer.tokens)
        if self.check:
            self.scheduler.check_integrity()

    def encode(self) -> bool:
        """Encode the next image. False when none is to be encoded."""
        if not self.scheduler.images_due:
            return False
        wanted = self.scheduler.next_images(self.encoded.capacity_rows, self.encoded)
        self.encoded.keep([one.digest for one in wanted])
        missing = [one for one in wanted if one.digest not in self.encoded]
        if missing:
            one = missing[0]
            image = self.messages[one.request_id].images[one.index]
            assert image.digest == one.digest
            self.encodings.append((one.request_id, one.digest))
            if one.digest in self.unfit:
                self.scheduler.reject([one.request_id], "the image cannot be encoded")
            else:
                self.encoded.put(one.digest, Rows(image.rows))
                assert all(w.digest in self.encoded or w in missing for w in wanted), "a wanted image was evicted"
        self.take(self.scheduler.drain_updates())
        return bool(missing)

    def plan(self) -> Plan | None:
        plan = self.scheduler.plan(self.encoded)
        self.take([])
        if plan is None:
            alive = self.scheduler.stats().waiting + self.scheduler.stats().running
            assert self.queue or self.owed or self.scheduler.images_due or not alive, "nothing to do, yet not done"
            return None
        for span in plan.spans:
            state = self.owner(span.slot).slots.state(span.slot)
            assert state is SlotState.ACTIVE, f"slot {span.slot} is planned but {state.name}"
        for span, owner in zip(plan.spans, plan.owners, strict=True):
            index = span.start + span.length - len(self.messages[owner].prompt)
            assert not span.sampled or index <= self.masks.get(owner, index), f"{owner} samples {index} without its mask"
        return plan

    def owner(self, slot: int = 0) -> Owner:
        """The owner of a slot; of all slots where there is one."""
        return self.scheduler._life.owners[slot % self.limits.owners]

    def launch(self, plan: Plan) -> None:
        self.plans.append(plan)
        self.scheduler.launched(plan)
        try:
            result = self.device.execute(plan)
        except CommandFailed:
            self.queue.append((plan, None))
        else:
            if plan.spans:
                self.queue.append((plan, result))
            else:
                self.take(self.scheduler.complete(result))
        self.take([])

    def discard(self, plan: Plan, half_sent: bool = False) -> None:
        """Give the plan back, after its FREEs and ALLOCs took effect if it was half sent."""
        if half_sent:
            self.device.move_slots(plan)
        self.scheduler.discard(plan, [alloc.slot for alloc in plan.allocs] if half_sent else [])
        self.take([])

    def read(self) -> None:
        """Results of the oldest plan."""
        plan, result = self.queue.popleft()
        if result is None:
            self.take(self.scheduler.fail(plan, "the forward failed"))
        else:
            self.take(self.scheduler.complete(result))

    def step(self) -> bool:
        """Encode an image, plan and launch one step, read what is older than `depth`. False when nothing could be done."""
        did = self.encode()
        plan = self.plan()
        if plan is not None:
            self.launch(plan)
        did = did or plan is not None
        while self.queue and (len(self.queue) > self.depth or plan is None):
            self.read()
            did = True
            if plan is None:
                break
        return did

    def run(self, most: int = 10_000) -> None:
        """To the end."""
        for _ in range(most):
            if not self.step() and not self.give_masks():
                break
        assert self.scheduler.idle
        self.check_end()

    def check_end(self) -> None:
        """Nothing leaks, and every request has its one terminal event."""
        stats = self.scheduler.stats()
        assert stats.free_blocks == self.limits.num_blocks * self.limits.owners
        assert stats.free_slots == self.limits.max_slots
        assert self.device.slots == [None] * self.limits.max_slots, "a slot was never freed on the device"
        assert (stats.running, stats.waiting) == (0, 0)
        assert all(answer.final is not None for answer in self.answers.values())

    def rows(self) -> list[tuple[Span, Submit]]:
        """The spans of all plans, in order, and whose they are."""
        owned = (zip(plan.spans, plan.owners, strict=True) for plan in self.plans)
        return [(span, self.messages[owner]) for plan in owned for span, owner in plan]

    def check_answers(self) -> None:
        """Finished requests got what they would get alone; ended ones a beginning of it."""
        for request_id in self.messages:
            self.check_answer(request_id)

    def check_answer(self, request_id: str) -> None:
        message, answer = self.messages[request_id], self.answers[request_id]
        sampling = message.sampling
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= set(self.limits.eos_token_ids)
        if several(message) is not None:
            self._check_looped(message, answer, stops)
            return
        tokens, finish = run_alone(rendered(message), sampling.max_tokens, stops, sampling.min_tokens)
        assert tokens[: len(message.generated)] == message.generated
        expected = tokens[len(message.generated) :]
        assert answer.final is not None
        if answer.final.finish in ("stop", "length"):
            assert answer.tokens == expected, request_id
            assert answer.final.finish == finish
            assert answer.final.stop_token == (tokens[-1] if finish == "stop" else None)
            self._check_prompt_logprobs(message, answer)
        else:
            assert answer.tokens == expected[: len(answer.tokens)]

    def _check_looped(self, message: Submit, answer: Answer, stops: frozenset[int]) -> None:
        """The tokens are those that the noted loops give; no loops are lost or out of their range."""
        loops, sampling = message.sampling.loops, message.sampling
        tokens, depths = [*message.generated, *answer.tokens], [*message.depths, *answer.depths]
        assert answer.final is not None
        if answer.final.status == 400:
            return
        assert tokens == run_looped(rendered(message), depths), message.request_id
        assert depths[:1] in ([], [0])
        assert all((1 if loops.thresholds else loops.most) <= depth <= loops.most for depth in depths[1:])
        ends = [count for count, token in enumerate(tokens, 1) if token in stops and count >= sampling.min_tokens]
        most = min([*ends, sampling.max_tokens])
        assert len(tokens) <= most
        if answer.final.finish in ("stop", "length"):
            assert len(tokens) == most
            assert answer.final.finish == ("stop" if most in ends else "length")
            assert answer.final.stop_token == (tokens[-1] if most in ends else None)
            self._check_prompt_logprobs(message, answer)

    def _check_prompt_logprobs(self, message: Submit, answer: Answer) -> None:
        expected = {}
        if message.sampling.prompt_logprobs is not None and not message.generated:
            seen = rendered(message)
            expected = {p: prompt_logprob(seen[:p], message.prompt[p]) for p in range(1, len(seen))}
        assert answer.prompt_logprobs == expected


def random_prompt(random: Random, most: int, alphabet: int = 50) -> list[int]:
    return [random.randrange(alphabet) for _ in range(random.randint(1, most))]
