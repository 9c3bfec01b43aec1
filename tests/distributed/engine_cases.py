"""What ranks run in the engine's tests; every function runs on every rank of a job, and rank 0 drives."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import numpy as np

from ep_runtime.engine.executor import Executor
from ep_runtime.scheduler.core import Plan
from model.base import Communicator
from model.batch import ForwardBatch, ForwardOutput
from model.state.registry import StateRegistry
from protocol.commands import BATCH, Alloc, Copy, Decode, Span, Wanted, Warm
from protocol.errors import EpCommandFailed, EpLinkLost
from protocol.frame import Frame
from protocol.messages import Abort, Mask, SamplingParams, SequenceUpdate, Submit
from protocol.slots import Change, SlotTable
from tests.support.cuda import nothing_may_synchronise
from tests.support.engine import Driver, head_of
from tests.support.rank_context import RankContext
from tests.support.waves import TURNS


def generate(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], together: bool, **settings: Any) -> Any:
    """Run the requests (all at once, or one after the other): their answers, and the head's totals."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        for number, request in enumerate(requests):
            driver.submit(str(number), **request)
            if not together:
                driver.finish()
        driver.finish()
        stats = driver.scheduler.stats()
        answers = [asdict(driver.answers[str(number)]) for number in range(len(requests))]
    return {"answers": answers, "preemptions": stats.preemptions, "steps": driver.broadcaster.step}


def abort_some(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], aborts: dict[str, int], **settings: Any) -> Any:
    """Run the requests together; abort request `r` once it has `aborts[r]` tokens (0: before its first turn)."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        for number, request in enumerate(requests):
            driver.submit(str(number), **request)
        pending = dict(aborts)
        while any(answer.finish is None for answer in driver.answers.values()):
            for request_id in [r for r, count in pending.items() if len(driver.answers[r].tokens) >= count]:
                driver.send(Abort([request_id]))
                del pending[request_id]
            driver.turn()
        driver.finish()
        return [asdict(driver.answers[str(number)]) for number in range(len(requests))]


def fail_alloc(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], rank: int, nth: int, **settings: Any) -> Any:
    """Run the requests together while one rank alone cannot prepare its `nth` ALLOC."""

    def arrange(executor: Executor) -> None:
        prepare, seen = executor.prepare, 0

        def failing(frame: Frame, slots: SlotTable) -> Change:
            nonlocal seen
            seen += isinstance(frame.command, Alloc)
            if isinstance(frame.command, Alloc) and seen == nth and ctx.rank == rank:
                raise EpCommandFailed("no room, on this rank alone")
            return prepare(frame, slots)

        executor.prepare = failing  # type: ignore[method-assign]

    with head_of(ctx, folder, arrange=arrange, **settings) as driver:
        return None if driver is None else _run(driver, requests)


def fail_forward(
    ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], ranks: list[int], token: int, **settings: Any
) -> Any:
    """Run the requests together while the forward of every batch that is given `token` fails on the ranks `ranks`."""

    def arrange(executor: Executor) -> None:
        forward = executor._model.forward

        def failing(batch: ForwardBatch, state: StateRegistry, comm: Communicator) -> ForwardOutput:
            if ctx.rank in ranks and bool((batch.token_ids == token).any()):
                raise ValueError(f"token {token} breaks the forward")
            return forward(batch, state, comm)

        executor._model.forward = failing  # type: ignore[method-assign]

    try:
        with head_of(ctx, folder, arrange=arrange, **settings) as driver:
            return None if driver is None else _run(driver, requests)
    except EpLinkLost as error:
        return f"{type(error).__name__}: {error}"


def refused_commands(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], **settings: Any) -> Any:
    """Between the turns of good requests, broadcast commands that every rank must refuse: the refusals, and the answers."""
    bad = [
        ("decode of an empty slot", Decode(spans=[Span(3, 0, 1, False, True, Wanted.LAST, [0])]), BATCH, [5]),
        ("slot out of range", Decode(spans=[Span(99, 0, 1, False, True, Wanted.LAST, [0])]), BATCH, [5]),
        ("budget past the longest sequence", Alloc(token_budget=10_000), 3, []),
        ("copy from an empty slot", Copy(source=3, length=4, token_budget=9), 2, []),
    ]
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        for number, request in enumerate(requests):
            driver.submit(str(number), **request)
        refusals = []
        for _, command, seq_id, tokens in bad:
            driver.turn()
            try:
                driver.broadcaster.run(command, seq_id, tokens=tokens)
            except EpCommandFailed as error:
                refusals.append(str(error))
        driver.finish()
        return {"refusals": refusals, "answers": [asdict(driver.answers[str(n)]) for n in range(len(requests))]}


def diverge(ctx: RankContext, *, folder: str, where: str, **settings: Any) -> Any:
    """One rank's state is changed behind the runtime's back; the next DIGEST must see it. The error on each rank."""
    changed = None

    def arrange(executor: Executor) -> None:
        nonlocal changed
        changed = executor

    try:
        with head_of(ctx, folder, arrange=arrange, digest_interval=4, **settings) as driver:
            if driver is None:
                return None
            driver.submit("0", prompt=[5, 6, 7], max_tokens=30)
            for _ in range(3):
                driver.turn()
            if where == "table":
                state = driver.epoch.slots[0]
                assert state is not None
                state.token_budget += 1
            else:
                assert changed is not None
                spec = changed._state.spec.states[-1]
                changed._state.recurrent(spec.layer, spec.name)[0].view(-1)[0] += 1e-3
            driver.finish()
            return "nothing was noticed"
    except EpLinkLost as error:
        return f"{type(error).__name__}: {error}"


def record_prefills(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], later: int, **settings: Any) -> Any:
    """Requests `later ...` arrive when the first are decoding: their answers, and how each step's rows were made up."""
    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        steps: list[tuple[int, int]] = []
        plan = driver.scheduler.plan

        def recording() -> Plan | None:
            made = plan()
            if made is not None:
                finishing = sum(span.sampled and span.length > 1 for span in made.spans)
                steps.append((finishing, sum(span.length == 1 for span in made.spans)))
            return made

        driver.scheduler.plan = recording  # type: ignore[method-assign]
        for number, request in enumerate(requests[:later]):
            driver.submit(str(number), **request)
        while min(len(answer.tokens) for answer in driver.answers.values()) < 3:
            driver.turn()
        for number, request in enumerate(requests[later:], later):
            driver.submit(str(number), **request)
        driver.finish()
        return {"steps": steps, "answers": [asdict(driver.answers[str(n)]) for n in range(len(requests))]}


def masked(ctx: RankContext, *, folder: str, prompt: list[int], allowed: list[list[int]], vocab: int, **settings: Any) -> Any:
    """One request whose token i must be in `allowed[i]`, with masks that come only after the token before, and one without."""

    def mask(ids: list[int]) -> bytes:
        words = np.zeros(-(-vocab // 32), dtype="<u4")
        for token in ids:
            words[token // 32] |= np.uint32(1 << (token % 32))
        return words.tobytes()

    with head_of(ctx, folder, **settings) as driver:
        if driver is None:
            return None
        params = SamplingParams(seed=0, temperature=0.0, max_tokens=len(allowed), ignore_eos=True, grammar=True)
        driver.send(Submit("masked", "masked", prompt, params, mask=mask(allowed[0])))
        driver.submit("free", prompt, max_tokens=len(allowed))

        def answer(update: SequenceUpdate) -> None:
            count = len(driver.answers["masked"].tokens)
            if update.request_id == "masked" and count < len(allowed):
                driver.port.send(Mask("masked", count, mask(allowed[count])))

        driver.on_update = answer
        driver.finish()
        return {name: asdict(driver.answers[name]) for name in ("masked", "free")}


def decode_without_waiting(
    ctx: RankContext, *, folder: str, prompts: list[list[int]], steps: int, digest_interval: int = 0, **settings: Any
) -> Any:
    """On one GPU: `steps` turns of steady decoding under a mode in which any call that waits for the device raises."""
    with head_of(ctx, folder, digest_interval=digest_interval, **settings) as driver:
        assert driver is not None
        for number, ids in enumerate(prompts):
            driver.submit(str(number), ids, max_tokens=4 * steps)
        while min(len(answer.tokens) for answer in driver.answers.values()) < 4:
            driver.turn()
        with nothing_may_synchronise():
            for _ in range(steps):
                driver.turn()
        driver.finish()
        return [len(driver.answers[str(number)].tokens) for number in range(len(prompts))]


def digest_while_decoding(ctx: RankContext, *, folder: str, prompts: list[list[int]], steps: int, **settings: Any) -> Any:
    """On GPUs: steady decoding with a digest behind every step. What was compiled, and how many steps ran outside of graphs."""
    import triton

    executors: list[Executor] = []
    with head_of(ctx, folder, digest_interval=1, arrange=executors.append, **settings) as driver:
        if driver is None:
            return None
        for number, ids in enumerate(prompts):
            driver.submit(str(number), ids, max_tokens=4 * steps)
        driver.turn()  # the prompts
        eager, compiled = 0, []
        (executor,) = executors
        batch = executor._batch

        def counting(*args: Any) -> Any:
            nonlocal eager
            eager += 1
            return batch(*args)

        def note(**what: Any) -> None:
            compiled.append(what["fn"].name)

        executor._batch = counting  # type: ignore[method-assign]
        triton.knobs.runtime.jit_post_compile_hook = note
        try:
            for _ in range(steps):
                driver.turn()
        finally:
            triton.knobs.runtime.jit_post_compile_hook = None
        recorded = sorted(executor._recorded)
        driver.finish()
        return {"compiled": compiled, "eager": eager, "recorded": recorded}


def compiled_while_serving(ctx: RankContext, *, folder: str, waves: list[list[dict[str, Any]]], **settings: Any) -> Any:
    """On GPUs, in a process that knows no kernels before: those that it compiles from ready on, while waves of requests overlap."""
    import triton

    forget_kernels()
    compiled: list[str] = []
    with head_of(ctx, folder, **settings) as driver:
        triton.knobs.runtime.jit_post_compile_hook = lambda **what: compiled.append(what["fn"].name)
        try:
            if driver is not None:
                for number, wave in enumerate(waves):
                    for place, request in enumerate(wave):
                        driver.submit(f"{number}-{place}", **request)
                    for _ in range(TURNS):
                        driver.turn()
                driver.finish()
                assert all(answer.error is None for answer in driver.answers.values())
        finally:
            triton.knobs.runtime.jit_post_compile_hook = None
    return compiled


def generate_rehearsed(ctx: RankContext, *, folder: str, requests: list[dict[str, Any]], **settings: Any) -> Any:
    """As `generate`, all at once, after a WARM in which every rank rehearses, as on GPUs; and whether a state was left."""
    left: list[bool] = []

    def arrange(executor: Executor) -> None:
        warm = executor._warm

        def rehearsing(command: Warm) -> None:
            warm(command)
            executor.rehearse()
            tensors = [*(t for pair in executor._state.paged._kv.values() for t in pair)]
            tensors += [executor._state.recurrent(spec.layer, spec.name) for spec in executor._state.spec.states]
            left.extend(bool(tensor.any()) for tensor in tensors)

        executor._warm = rehearsing  # type: ignore[method-assign]

    with head_of(ctx, folder, arrange=arrange, **settings) as driver:
        if driver is None:
            return any(left), len(left) > 0
        answers = _run(driver, requests)
    return any(left), len(left) > 0, answers


def forget_kernels() -> None:
    """Have Triton compile, or find in its cache, whatever this process launches from now on."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith("kernels."):
            for kernel in vars(module).values():
                if hasattr(kernel, "device_caches"):
                    kernel.device_caches.clear()


def _run(driver: Driver, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for number, request in enumerate(requests):
        driver.submit(str(number), **request)
    driver.finish()
    return [asdict(driver.answers[str(number)]) for number in range(len(requests))]
