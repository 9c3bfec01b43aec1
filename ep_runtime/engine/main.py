"""The engine process of one rank: `python -P -m ep_runtime.engine.main --control-fd N`, started by its supervisor.

Over the control socket it is told its rank and configuration, loads, and then serves any number of epochs. What ends an epoch
(`EpLinkLost`) ends no more than that: it is reported, and the weights stay. It ends with status 0 after STOP; anything else, a
device error above all, is reported first and ends it with status 1.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ep_runtime.config import RuntimeConfig
from ep_runtime.engine.broadcast import Broadcaster
from ep_runtime.engine.comm import open_store
from ep_runtime.engine.control import Control, SupervisorGoneError
from ep_runtime.engine.epoch import EpochPlace, RankEpoch, open_head, open_worker
from ep_runtime.engine.head import Head
from ep_runtime.engine.port import ZmqPort
from ep_runtime.engine.preload import preload
from ep_runtime.engine.rank import RankModel, load_rank
from ep_runtime.engine.sampler import Sampler
from ep_runtime.engine.setup import image_encoder, scheduler_limits, warm_buckets
from ep_runtime.scheduler.scheduler import Scheduler
from model.errors import ModelError
from model.parallel import Parallel
from protocol.ack import ErrorCode, error_code
from protocol.errors import EpEpochClosed, EpLinkLost
from protocol.links import HeadLinks, WorkerLink
from protocol.listener import Listener
from protocol.message_socket import MessageSocket
from protocol.messages import (
    BeginEpoch,
    EndEpoch,
    EpochEnded,
    EpochOpened,
    EpochReady,
    Loaded,
    OpenEpoch,
    Ready,
    Report,
    Stop,
    ToEngineControl,
    Welcome,
)
from protocol.progress import Phase, ProgressPage

log = logging.getLogger(__name__)

YOUNG_OBJECTS = 20_000
"""Objects made and not dropped that start a collection. A step of 512 sequences has about 5,000 at once."""

DROPPED_LINGER_MS = 20
"""For results of an epoch that failed: a frontend that reads has them by then, and replays what it has not."""


class DeviceLostError(Exception):
    """This rank's device failed: the process ends, and another one starts with a fresh context."""


@dataclass(frozen=True, slots=True)
class OpenedEpoch:
    """What the head holds for an epoch from OpenEpoch on: where the ranks meet."""

    epoch: int
    listener: Listener
    store: Any


class Engine:
    """One rank's process: what it has loaded, and the epoch that it is in."""

    def __init__(self, control: Control, page: ProgressPage, *, device_index: int, local_ranks: int, runtime_dir: Path) -> None:
        self._control = control
        self._page = page
        self._device_index = device_index
        self._local_ranks = local_ranks
        self._runtime_dir = runtime_dir
        self._opened: OpenedEpoch | None = None
        self.epoch = 0

    def run(self) -> None:
        """Load, then serve epochs until STOP."""
        match self._control.next():
            case Welcome() as welcome:
                rank = self._load(welcome)
            case Stop():
                return
            case message:
                raise RuntimeError(f"expected Welcome first, got {type(message).__name__}")
        while self._control.stop is None:
            match self._control.next():
                case OpenEpoch() as message:
                    self._open(message, rank.config)
                case BeginEpoch() as message:
                    self._serve(message, rank)
                case EndEpoch() as message:
                    self._forget(message.epoch)
                    self._control.answer(message)
                case Stop():
                    pass
                case message:
                    raise RuntimeError(f"the supervisor sent {type(message).__name__} out of turn")

    def report(self, error: Exception, fatal: bool = False) -> None:
        """Tell the supervisor what was found here."""
        self._control.send(
            Report(rank=self._control.rank, epoch=self.epoch, error=type(error).__name__, message=str(error), fatal=fatal)
        )

    def _load(self, welcome: Welcome) -> RankModel:
        started = time.monotonic()
        self._control.rank = welcome.rank
        self._page.enter(Phase.LOADING)
        config = RuntimeConfig.from_json(welcome.config)
        logging.getLogger().setLevel(config.log_level.upper())
        rank = load_rank(
            config,
            Parallel(welcome.rank, welcome.world),
            pick_device(config.device, self._device_index),
            local_ranks=self._local_ranks,
        )
        collect_garbage()
        self._page.enter(Phase.IDLE)
        self._control.send(Loaded(welcome.rank, {"load": time.monotonic() - started}))
        return rank

    # Epochs

    def _open(self, message: OpenEpoch, config: RuntimeConfig) -> None:
        """On the head: a fresh store and listener, whose addresses the coordinator hands to every rank."""
        self._close_opened()
        self._page.begin_epoch(message.epoch)
        host = config.coordinator_host
        address = f"unix:{self._runtime_dir}/links-{message.epoch}" if host is None else f"{host}:0"
        listener = Listener(address)
        store, where = open_store(host or "127.0.0.1", message.world)
        self._opened = OpenedEpoch(message.epoch, listener, store)
        self._control.send(EpochOpened(message.epoch, where, listener.address))

    def _forget(self, epoch: int) -> None:
        """An epoch that was opened and not begun will not be."""
        if self._opened is not None and self._opened.epoch == epoch:
            self._close_opened()
            self._page.enter(Phase.IDLE)

    def _close_opened(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.listener.close()

    def _serve(self, begin: BeginEpoch, rank: RankModel) -> None:
        """One epoch, from its links to the last trace of it here."""
        self.epoch = begin.epoch
        self._control.enter(begin.epoch)
        self._page.begin_epoch(begin.epoch)
        place = EpochPlace(
            epoch=begin.epoch,
            world=begin.world,
            store=begin.store,
            links=begin.links,
            token=rank.config.token or "",
            host=rank.config.coordinator_host or "127.0.0.1",
        )
        try:
            with ExitStack() as leaving:
                leaving.callback(self._close_opened)
                self._run(place, rank, leaving)
        except EpLinkLost as lost:
            log.info("epoch %d is left: %s", begin.epoch, lost)
        self._page.enter(Phase.IDLE)
        self._control.leave()
        collect_garbage()

    def _run(self, place: EpochPlace, rank: RankModel, leaving: ExitStack) -> None:
        """Raises `EpLinkLost` when the epoch ends by that, after it has been reported, if it was found here."""
        try:
            if rank.parallel.rank == 0:
                self._run_head(place, rank, leaving)
            else:
                self._run_worker(place, rank, leaving)
        except EpEpochClosed:
            raise
        except EpLinkLost as lost:
            if device_failed(lost):
                raise DeviceLostError(str(lost)) from lost
            if self._control.stop is None:
                self.report(lost)
            raise

    def _run_head(self, place: EpochPlace, rank: RankModel, leaving: ExitStack) -> None:
        port = ZmqPort(self._runtime_dir, place.epoch, wake_fd=self._control.fileno())
        leaving.callback(lambda: port.close() if self._control.stop is not None else port.close(DROPPED_LINGER_MS))
        opened = self._opened
        if place.world > 1 and (opened is None or opened.epoch != place.epoch):
            raise RuntimeError(f"BeginEpoch of epoch {place.epoch}, which was not opened here")
        listener = opened.listener if opened is not None and place.world > 1 else None
        epoch, broadcaster, links = open_head(rank, place, listener, self._control.closed, self._page)
        self._hold(leaving, epoch, links)
        if opened is not None:
            opened.listener.close()
        head = self._head(place, rank, epoch, broadcaster, port)
        head.warm(warm_buckets(rank), rank.config.warm_timeout)
        self._formed(place)
        head.run(self._control.stopping, self._control.grace_left)
        port.publish(EpochEnded(place.epoch, "the server stops", final=True))

    def _run_worker(self, place: EpochPlace, rank: RankModel, leaving: ExitStack) -> None:
        epoch, worker, link = open_worker(rank, place, self._control.closed, self._page)
        self._hold(leaving, epoch, link)
        self._formed(place)
        worker.run(epoch.slots)

    def _hold(self, leaving: ExitStack, epoch: RankEpoch, links: HeadLinks | WorkerLink) -> None:
        """What leaving undoes: the links first, so that the others know before a collective of theirs is cut short."""
        leaving.callback(epoch.close)
        leaving.callback(links.close)
        leaving.callback(self._page.enter, Phase.LEAVING)

    def _head(self, place: EpochPlace, rank: RankModel, epoch: RankEpoch, broadcaster: Broadcaster, port: ZmqPort) -> Head:
        limits = scheduler_limits(rank, epoch.limits)
        ready = EpochReady(
            epoch=place.epoch,
            max_model_len=limits.max_model_len,
            vocab_size=rank.spec.vocab_size,
            max_num_seqs=limits.max_slots,
            stop_token_ids=list(limits.eos_token_ids),
            block_size=limits.block_size,
            world=place.world,
            forward_mode=rank.config.forward_mode or "eager",
            inputs=list(rank.spec.inputs),
            max_loops=rank.spec.max_loops,
        )
        return Head(
            broadcaster=broadcaster,
            scheduler=Scheduler(limits),
            sampler=Sampler(rank.spec.vocab_size, limits.max_slots, rank.device, limits.eos_token_ids),
            port=port,
            epoch=place.epoch,
            digest_interval=rank.config.digest_interval,
            check_epoch=broadcaster.check,
            announce=lambda: port.publish(ready),
            encoder=image_encoder(rank, epoch.executor),
            page=self._page,
        )

    def _formed(self, place: EpochPlace) -> None:
        """The epoch runs. What forming it left behind is dropped now and not in the middle of a step."""
        gc.collect()
        self._control.formed()
        self._control.send(Ready(place.epoch, self._control.rank))


def pick_device(kind: str, index: int) -> torch.device:
    """The rank's device; "auto" is CUDA where there is any."""
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", index)
    return torch.device("cpu")


def collect_garbage() -> None:
    """Between epochs: drop what is left in cycles. What stays lives as long as the process, and later collections pass over it.

    A step of many sequences makes more objects than start a collection by default, and drops them again. What starts one from now
    on is a growth that no step has.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def device_failed(error: BaseException) -> bool:
    """Whether a device error is among an error's causes. After one, nothing on that device can be trusted."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop()
        if cause is not None and not any(cause is known for known in seen):
            seen.append(cause)
            waiting += [cause.__cause__, None if cause.__suppress_context__ else cause.__context__]
    return any(error_code(cause) is ErrorCode.DEVICE for cause in seen)


def main(argv: list[str] | None = None) -> int:
    """Run the engine; the exit status."""
    parser = argparse.ArgumentParser(prog="ep_runtime.engine.main", description="engine of one rank; started by its supervisor")
    parser.add_argument("--control-fd", type=int, required=True, help="socket to the supervisor")
    parser.add_argument("--progress-fd", type=int, help="shared page where this engine notes what it does")
    parser.add_argument("--device-index", type=int, default=0, help="CUDA device of this rank")
    parser.add_argument("--local-ranks", type=int, default=1, help="ranks on this host, which share its memory")
    parser.add_argument("--runtime-dir", type=Path, required=True, help="private folder for sockets")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s", stream=sys.stderr)
    page = ProgressPage() if args.progress_fd is None else ProgressPage.open(args.progress_fd)
    page.enter(Phase.STARTING)
    preload()
    collect_garbage()
    page.enter(Phase.STANDBY)
    control = Control(MessageSocket(socket.socket(fileno=args.control_fd), ToEngineControl, peer="the supervisor"))
    engine = Engine(control, page, device_index=args.device_index, local_ranks=args.local_ranks, runtime_dir=args.runtime_dir)
    try:
        engine.run()
    except SupervisorGoneError as error:
        log.error("%s", error)
        return 1
    except Exception as error:
        if isinstance(error, ModelError):
            log.error("%s: %s", type(error).__name__, error)
        else:
            log.exception("engine ends")
        try:
            engine.report(error, fatal=isinstance(error, ModelError))
        except SupervisorGoneError as gone:
            log.error("the report could not be sent: %s", gone)
        return 1
    return 0


def end_process(status: int) -> None:
    """End at once. What torch and CUDA would take down first may wait for a peer that is gone, or for a device that is stuck."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    end_process(main())
