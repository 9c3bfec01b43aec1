"""A whole engine on the ranks of a pool job: load, form the epoch, drive the head by hand, tear down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ep_runtime.config import Facts, RuntimeConfig, resolve
from ep_runtime.engine.broadcast import Broadcaster
from ep_runtime.engine.comm import open_store
from ep_runtime.engine.epoch import EpochPlace, RankEpoch, open_head, open_worker
from ep_runtime.engine.executor import Executor
from ep_runtime.engine.head import Head
from ep_runtime.engine.main import pick_device
from ep_runtime.engine.port import LocalPort
from ep_runtime.engine.rank import RankModel, load_rank
from ep_runtime.engine.sampler import Sampler
from ep_runtime.engine.setup import image_encoder, scheduler_limits, warm_buckets
from ep_runtime.scheduler.scheduler import Scheduler
from model.parallel import Parallel
from protocol.errors import EpEpochClosed
from protocol.listener import Listener
from protocol.messages import Results, SamplingParams, SequenceUpdate, Submit, ToEngine
from protocol.progress import ProgressPage
from protocol.slots import check_integrity
from tests.support.rank_context import RankContext

TOKEN = "a token of the tests"


def read_settings(ctx: RankContext, folder: str, device: str = "cpu", **settings: Any) -> RuntimeConfig:
    """A configuration for a job of this world; `settings` are fields of RuntimeConfig. On "cuda", rank r has device r."""
    facts = Facts(gpus=0, cores=1, world=ctx.world, local_world=ctx.world)
    return resolve(RuntimeConfig(model=folder, device=device, threads=1, **settings), facts)


def load(ctx: RankContext, folder: str, ahead: bool = False, **settings: Any) -> RankModel:
    """This rank's weights; unless `ahead`, kernels are compiled as they are needed, which for one test are not all."""
    config = read_settings(ctx, folder, **settings)
    device = pick_device(config.device, ctx.rank)
    return load_rank(config, Parallel(ctx.rank, ctx.world), device, local_ranks=ctx.world, ahead=ahead)


@contextmanager
def meeting(ctx: RankContext, epoch: int = 0) -> Iterator[tuple[EpochPlace, Listener | None]]:
    """The place of an epoch, and on rank 0 its listener; addresses go through the job's store."""
    if ctx.world == 1:
        yield EpochPlace(epoch=epoch, world=1, store="", links="", token=TOKEN), None
        return
    if ctx.rank == 0:
        with Listener(f"unix:{ctx.runtime_dir}/links-{epoch}") as listener:
            store, address = open_store("127.0.0.1", ctx.world)
            ctx.store().set(f"place-{epoch}", f"{address} {listener.address}")
            yield EpochPlace(epoch=epoch, world=ctx.world, store=address, links=listener.address, token=TOKEN), listener
            del store
        return
    address, links = ctx.store().get(f"place-{epoch}").decode().split()
    yield EpochPlace(epoch=epoch, world=ctx.world, store=address, links=links, token=TOKEN), None


@dataclass
class Answer:
    """What became of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    status: int = 200
    error: str | None = None
    cached: int = 0
    terminal_events: int = 0

    def take(self, update: SequenceUpdate) -> None:
        """Add one update."""
        self.tokens += update.tokens
        self.logprobs += [entry.logprob for entry in update.logprobs or []]
        self.prompt_logprobs += [entry.logprob for entry in update.prompt_logprobs or []]
        self.cached += update.cached
        if update.finish is not None:
            self.terminal_events += 1
            self.finish, self.status, self.error = update.finish, update.status, update.error


class Driver:
    """The head of a job, driven turn by turn, and the answers so far."""

    def __init__(
        self,
        rank: RankModel,
        epoch: RankEpoch,
        broadcaster: Broadcaster,
        *,
        lookahead: bool,
        digest_interval: int,
        page: ProgressPage | None = None,
    ) -> None:
        self.answers: dict[str, Answer] = {}
        self.epoch = epoch
        self.broadcaster = broadcaster
        self.on_update: Callable[[SequenceUpdate], None] = lambda update: None
        self.page = page if page is not None else ProgressPage()
        self.closed = ""
        self.port = LocalPort(self._take)
        limits = scheduler_limits(rank, epoch.limits)
        self.scheduler = Scheduler(limits)
        self.sampler = Sampler(rank.spec.vocab_size, limits.max_slots, rank.device, limits.eos_token_ids)
        self.encoder = image_encoder(rank, epoch.executor)
        self.head = Head(
            broadcaster=broadcaster,
            scheduler=self.scheduler,
            sampler=self.sampler,
            port=self.port,
            epoch=0,
            digest_interval=digest_interval,
            read_when_ready=not lookahead,
            page=self.page,
            check_epoch=self._check_epoch,
            encoder=self.encoder,
        )
        self.head.warm(warm_buckets(rank), rank.config.warm_timeout)

    def send(self, message: ToEngine) -> None:
        """Hand the head a message; it is read on the next turn."""
        if isinstance(message, Submit):
            self.answers[message.request_id] = Answer()
        self.port.send(message)

    def submit(self, request_id: str, prompt: list[int], **sampling: Any) -> None:
        """Submit one sequence, greedy and of a `group` of its own unless told otherwise."""
        group = sampling.pop("group", request_id)
        params = {"seed": 0, "temperature": 0.0, "ignore_eos": True, **sampling}
        self.send(Submit(request_id=request_id, group=group, prompt=prompt, sampling=msgspec.convert(params, SamplingParams)))

    def turn(self) -> None:
        """One turn of the head, with the books checked after it."""
        self.head.turn(idle_wait_s=0.0)
        self.scheduler.check_integrity()
        check_integrity(self.epoch.slots, self.epoch.limits)

    def finish(self, limit: int = 20_000) -> dict[str, Answer]:
        """Turn until every request has its terminal event."""
        for _ in range(limit):
            if all(answer.finish is not None for answer in self.answers.values()) and self.head.idle:
                break
            self.turn()
        return self.answers

    def shutdown(self) -> None:
        """End the epoch on every rank, and see that nothing is left over."""
        self.head.shutdown()
        assert all(state is None for state in self.epoch.slots), "a slot is still held after shutdown"
        stats = self.scheduler.stats()
        assert (stats.free_blocks, stats.free_slots) == (stats.total_blocks, stats.total_slots)

    def _check_epoch(self) -> None:
        """The epoch is closed once `closed` gives a reason; else as an engine checks it: a worker may have failed in a step."""
        if self.closed:
            raise EpEpochClosed(self.closed)
        self.broadcaster.check()

    def _take(self, results: Results) -> None:
        for update in results.updates:
            self.answers[update.request_id].take(update)
            self.on_update(update)


@contextmanager
def head_of(
    ctx: RankContext,
    folder: str,
    *,
    lookahead: bool = False,
    digest_interval: int = 3,
    arrange: Callable[[Executor], None] = lambda executor: None,
    **settings: Any,
) -> Iterator[Driver | None]:
    """On rank 0 a Driver whose epoch ends with the block; on the other ranks None, after their loop has ended.

    `arrange` sees every rank's executor before its first command, to break something in it.
    """
    rank = load(ctx, folder, **settings)
    with epoch_of(ctx, rank, lookahead=lookahead, digest_interval=digest_interval, arrange=arrange) as driver:
        yield driver


@contextmanager
def epoch_of(
    ctx: RankContext,
    rank: RankModel,
    number: int = 0,
    *,
    lookahead: bool = False,
    digest_interval: int = 3,
    arrange: Callable[[Executor], None] = lambda executor: None,
) -> Iterator[Driver | None]:
    """One epoch of ranks that have loaded; see `head_of`. Every epoch of a job has a number of its own."""
    with meeting(ctx, number) as (place, listener):
        if ctx.rank != 0:
            epoch, worker, link = open_worker(rank, place, lambda: False)
            arrange(epoch.executor)
            with closing(epoch), closing(link):
                worker.run(epoch.slots)
                assert all(state is None for state in epoch.slots), "a slot is still held after shutdown"
            yield None
            return
        page = ProgressPage()
        epoch, broadcaster, links = open_head(rank, place, listener, lambda: False, page)
        arrange(epoch.executor)
        with closing(epoch), closing(links):
            driver = Driver(rank, epoch, broadcaster, lookahead=lookahead, digest_interval=digest_interval, page=page)
            yield driver
            driver.shutdown()
