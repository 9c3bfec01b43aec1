"""What ranks run in the tests of images through the whole engine: requests with images, and a record of what became of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from ep_runtime.engine.executor import Choose, Executor
from ep_runtime.scheduler.core import Plan
from model.vision.tower import Encoding
from protocol.commands import BATCH, Alloc, Body, Digest, Forward, Free, Vision
from protocol.errors import EpCommandFailed
from protocol.frame import Frame
from protocol.messages import Abort, SamplingParams, Submit, VisionInput
from protocol.sections import unpack_sections
from protocol.slots import Change, SlotTable
from tests.distributed.vision_cases import GRIDS, LENGTH, failure, show
from tests.support.engine import Driver, epoch_of, head_of, load
from tests.support.rank_context import RankContext

Request = dict[str, Any]

SLICE_COST = 2e6
"""Operations: a block of several images of these tests at once, and the same slices in every world."""


class Record:
    """What the head does from now on: plans launched, commands sent, digests compared, images a finished pass of the encoder."""

    def __init__(self, driver: Driver) -> None:
        self.steps: list[dict[str, Any]] = []
        self.commands: Counter[str] = Counter()
        self.visions: list[tuple[int, int]] = []
        self.inputs: list[str] = []
        self.passes: list[int] = []
        self.failed = 0
        self._driver = driver
        self._run, self._launched = driver.broadcaster.run, driver.scheduler.launched
        driver.broadcaster.run = self.run  # type: ignore[method-assign]
        driver.scheduler.launched = self.launched  # type: ignore[method-assign]
        encoder = driver.encoder
        assert encoder is not None
        encoder._slice_cost = SLICE_COST
        tower, rows = encoder._tower, encoder._tower.rows

        def finished(encoding: Encoding) -> list[torch.Tensor]:
            found = rows(encoding)
            self.passes.append(len(found))
            return found

        tower.rows = finished  # type: ignore[method-assign]

    def run(self, command: Body, seq_id: int, **options: Any) -> None:
        """Send a command; it is counted when no rank has refused it, and DIGEST when all ranks have the same."""
        try:
            self._run(command, seq_id, **options)
        except EpCommandFailed:
            self.failed += 1
            raise
        self.commands[command.cmd.name] += 1
        if isinstance(command, Vision):
            self.visions.append((command.rows, command.skipped))
        elif isinstance(command, Digest):
            epoch = self._driver.epoch
            self.inputs.append(unpack_sections(epoch.executor.digest(epoch.slots).text)["inputs"])

    def launched(self, plan: Plan) -> None:
        """Note the plan's slots and spans, with their requests."""
        allocs = [(alloc.request_id, alloc.slot) for alloc in plan.allocs]
        spans = [(owner, span.start, span.length) for owner, span in zip(plan.owners, plan.spans, strict=True)]
        self.steps.append({"allocs": allocs, "spans": spans})
        self._launched(plan)

    def planned(self, request_id: str) -> int:
        """Where the request's last span ended; 0 before the first."""
        ends = (start + length for step in self.steps for owner, start, length in step["spans"] if owner == request_id)
        return max(ends, default=0)

    def report(self) -> dict[str, Any]:
        """Everything, as plain data, with the answers and the scheduler's count of preemptions."""
        return {
            "steps": self.steps,
            "commands": dict(self.commands),
            "visions": self.visions,
            "inputs": self.inputs,
            "passes": list(self.passes),
            "failed": self.failed,
            "preemptions": self._driver.scheduler.stats().preemptions,
            "answers": {name: asdict(answer) for name, answer in self._driver.answers.items()},
        }


def submit(driver: Driver, name: str, request: Request, generated: list[int]) -> None:
    """Submit a request, greedy, with the tokens that it had in an earlier epoch."""
    sampling = {key: value for key, value in request.items() if key not in ("prompt", "images")}
    params = SamplingParams(seed=0, temperature=0.0, ignore_eos=True, **sampling)
    images = [VisionInput(**image) for image in request["images"]]
    driver.send(Submit(name, name, list(request["prompt"]), params, images=images, generated=generated))
    driver.answers[name].tokens = list(generated)


def settle(driver: Driver) -> None:
    """Turn until everything is answered; then all ranks hold the same, and the head's books are empty."""
    driver.finish()
    driver.turn()
    driver.head._upkeep.compare()
    driver.head._upkeep.check_books()


def serve(
    ctx: RankContext,
    *,
    folder: str,
    requests: dict[str, Request],
    together: bool = True,
    failing: tuple[int, ...] = (),
    **settings: Any,
) -> Any:
    """Run the requests, all at once or one after the other: the head's record.

    On every rank the forwards `failing`, of those that are given rows of images beside rows of others, fail after they have run.
    """

    def arrange(executor: Executor) -> None:
        execute, seen = executor.execute, 0

        def faulty(frame: Frame, change: Change, slots: SlotTable, choose: Choose) -> None:
            nonlocal seen
            command, held = frame.command, slots.vision_rows > 0
            execute(frame, change, slots, choose)
            if isinstance(command, Forward) and held and len(command.spans) > 1:
                seen += 1
                if seen in failing:
                    raise ValueError("a forward with images fails")

        executor.execute = faulty  # type: ignore[method-assign]

    with head_of(ctx, folder, arrange=arrange, **settings) as driver:
        if driver is None:
            return None
        record = Record(driver)
        for name, request in requests.items():
            submit(driver, name, request, [])
            if not together:
                driver.finish()
        settle(driver)
        return record.report()


def abort_some(ctx: RankContext, *, folder: str, requests: dict[str, Request], moments: dict[str, str], **settings: Any) -> Any:
    """Run the requests together, and abort some at their moment: the head's record, and the requests whose moment came.

    The moments: "encoding", between two blocks of the tower; "shown", between VISION and the end of its images; "decoding".
    """
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        record = Record(driver)
        encoder = driver.encoder
        assert encoder is not None
        for name, request in requests.items():
            submit(driver, name, request, [])

        def due(name: str, moment: str) -> bool:
            if moment == "encoding":
                under_way = encoder._pass
                return under_way is not None and under_way.encoding is not None and name in encoder.requests
            if moment == "shown":
                last = requests[name]["images"][-1]
                return 0 < record.planned(name) < last["start"] + last["height"] * last["width"]
            return len(driver.answers[name].tokens) >= 3

        met: list[str] = []
        while any(answer.finish is None for answer in driver.answers.values()):
            for name in [name for name in moments if name not in met and due(name, moments[name])]:
                met.append(name)
                driver.send(Abort([name]))
            if encoder._pass is not None:
                encoder._pass.layers = 1
            driver.turn()
        settle(driver)
        return record.report() | {"met": met}


def epochs(ctx: RankContext, *, folder: str, requests: dict[str, Request], turns: list[int], **settings: Any) -> Any:
    """Epochs of ranks that load once: each but the last is left after so many turns, and what had not ended goes on in the next.

    The head's records, one an epoch.
    """
    rank = load(ctx, folder, **settings)
    done: dict[str, list[int]] = {}
    ended: set[str] = set()
    records = []
    for number, most in enumerate([*turns, 0]):
        with epoch_of(ctx, rank, number, digest_interval=1) as driver:
            if driver is None:
                continue
            record = Record(driver)
            for name, request in requests.items():
                if name not in ended:
                    submit(driver, name, request, done.get(name, []))
            if most:
                for _ in range(most):
                    driver.turn()
            else:
                settle(driver)
            records.append(record.report())
            ended |= {name for name, answer in driver.answers.items() if answer.finish is not None}
            done |= {name: answer.tokens for name, answer in driver.answers.items()}
    return records or None


def short_prompts(ctx: RankContext, *, folder: str, **settings: Any) -> Any:
    """VISION for a prompt that ends in an image and was allocated a position too few: the refusal. Then one of the right length."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        run = driver.broadcaster.run
        stop = GRIDS[-1].stop
        assert stop < LENGTH
        run(Alloc(token_budget=40, prompt_length=stop - 1), 0)
        said = failure(partial(show, driver))
        run(Digest(), BATCH)
        run(Free(), 0)
        run(Alloc(token_budget=40, prompt_length=stop), 0)
        show(driver)
        run(Digest(), BATCH)
        run(Free(), 0)
        return said
