"""The engine process of one rank: `python -P -m ep_runtime.engine.main --control-fd N`, started by its supervisor.

Over the control socket it is told its rank and configuration, loads, and then serves the epochs that it is told to begin. It ends
with status 0 only after STOP; anything else is reported first and ends it with status 1.
"""

from __future__ import annotations

import argparse
import gc
import logging
import socket
import sys
import time
from collections import deque
from contextlib import closing
from pathlib import Path

import torch

from ep_runtime.config import RuntimeConfig
from ep_runtime.engine.broadcast import Broadcaster
from ep_runtime.engine.comm import open_store
from ep_runtime.engine.epoch import EpochPlace, RankEpoch, open_head, open_worker
from ep_runtime.engine.head import Head
from ep_runtime.engine.port import ZmqPort
from ep_runtime.engine.rank import RankModel, load_rank
from ep_runtime.engine.sampler import Sampler
from ep_runtime.engine.setup import scheduler_limits, warm_buckets
from ep_runtime.scheduler.scheduler import Scheduler
from model.errors import ModelError
from model.parallel import Parallel
from protocol.errors import EpEpochClosed, EpLinkLost
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

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 10.0


class Engine:
    """One rank's process: what it was told, what it has loaded, and the epoch it is in."""

    def __init__(self, control: MessageSocket, *, device_index: int, local_ranks: int, runtime_dir: Path) -> None:
        self._control = control
        self._device_index = device_index
        self._local_ranks = local_ranks
        self._runtime_dir = runtime_dir
        self.rank = 0
        self.epoch = 0
        self._stop: Stop | None = None
        self._stopped_at = 0.0
        self._ended: EndEpoch | None = None
        self._later: deque[object] = deque()
        self._listener: Listener | None = None
        self._store: object = None

    def run(self) -> None:
        """Load, then serve epochs until STOP."""
        welcome = self._control.recv()
        if not isinstance(welcome, Welcome):
            raise RuntimeError(f"expected Welcome first, got {type(welcome).__name__}")
        self.rank = welcome.rank
        config = RuntimeConfig.from_json(welcome.config)
        logging.getLogger().setLevel(config.log_level.upper())
        rank = load_rank(
            config,
            Parallel(welcome.rank, welcome.world),
            pick_device(config.device, self._device_index),
            local_ranks=self._local_ranks,
        )
        self._control.send(Loaded(welcome.rank), SEND_TIMEOUT_S)
        while self._stop is None:
            match self._later.popleft() if self._later else self._control.recv():
                case OpenEpoch() as message:
                    self._open(message, config)
                case BeginEpoch() as message:
                    self._serve(message, rank)
                case message:
                    self._note(message)

    def _open(self, message: OpenEpoch, config: RuntimeConfig) -> None:
        """On the head: a fresh store and listener, whose addresses the coordinator hands to every rank."""
        host = config.coordinator_host
        if host is None:
            self._listener = Listener(f"unix:{self._runtime_dir}/links-{message.epoch}")
        else:
            self._listener = Listener(f"{host}:0")
        self._store, store = open_store(host or "127.0.0.1", message.world)
        self._control.send(EpochOpened(message.epoch, store, self._listener.address), SEND_TIMEOUT_S)

    def _serve(self, begin: BeginEpoch, rank: RankModel) -> None:
        self._ended = None
        self.epoch = begin.epoch
        place = EpochPlace(
            epoch=begin.epoch,
            world=begin.world,
            store=begin.store,
            links=begin.links,
            token=rank.config.token or "",
            host=rank.config.coordinator_host or "127.0.0.1",
        )
        try:
            if rank.parallel.rank == 0:
                self._serve_head(place, rank)
            else:
                self._serve_worker(place, rank)
        except EpEpochClosed:
            if self._ended is None and self._stop is None:
                raise

    def _serve_head(self, place: EpochPlace, rank: RankModel) -> None:
        epoch, broadcaster, links = open_head(rank, place, self._listener if place.world > 1 else None, self._epoch_closed)
        with closing(epoch), closing(links):
            if self._listener is not None:
                self._listener.close()
            with closing(ZmqPort(self._runtime_dir, place.epoch, wake_fd=self._control.fileno())) as port:
                self._run_head(place, rank, epoch, broadcaster, port)

    def _run_head(self, place: EpochPlace, rank: RankModel, epoch: RankEpoch, broadcaster: Broadcaster, port: ZmqPort) -> None:
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
        )
        head = Head(
            broadcaster=broadcaster,
            scheduler=Scheduler(limits),
            sampler=Sampler(rank.spec.vocab_size, limits.max_slots, rank.device, limits.eos_token_ids),
            port=port,
            epoch=place.epoch,
            digest_interval=rank.config.digest_interval,
            check_epoch=self._check_epoch,
            announce=lambda: port.publish(ready),
        )
        head.warm(warm_buckets(rank), rank.config.warm_timeout)
        collect_garbage_once()
        self._control.send(Ready(place.epoch, 0), SEND_TIMEOUT_S)
        head.run(self._stopping, self._grace_left)
        port.publish(EpochEnded(place.epoch, "the server stops", final=True))

    def _serve_worker(self, place: EpochPlace, rank: RankModel) -> None:
        epoch, worker, link = open_worker(rank, place, self._epoch_closed)
        with closing(epoch), closing(link):
            collect_garbage_once()
            self._control.send(Ready(place.epoch, rank.parallel.rank), SEND_TIMEOUT_S)
            worker.run(epoch.slots)

    # The control socket, while an epoch runs

    def _poll(self) -> None:
        """What follows the epoch's end, such as the next epoch, waits until this one is left."""
        for message in self._control.ready():
            if self._ended is None:
                self._note(message)
            else:
                self._later.append(message)

    def _note(self, message: object) -> None:
        match message:
            case Stop():
                self._stop = message
                self._stopped_at = time.monotonic()
            case EndEpoch():
                self._ended = message
            case _:
                raise RuntimeError(f"the supervisor sent {type(message).__name__} out of turn")

    def _stopping(self) -> bool:
        self._check_epoch()
        return self._stop is not None

    def _grace_left(self) -> float:
        assert self._stop is not None
        return self._stopped_at + self._stop.grace - time.monotonic()

    def _epoch_closed(self) -> bool:
        self._poll()
        return self._ended is not None

    def _check_epoch(self) -> None:
        if self._epoch_closed():
            assert self._ended is not None
            raise EpEpochClosed(self._ended.reason)


def pick_device(kind: str, index: int) -> torch.device:
    """The rank's device; "auto" is CUDA where there is any."""
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", index)
    return torch.device("cpu")


def collect_garbage_once() -> None:
    """What lives now lives as long as the process: later collections need not look at it."""
    gc.collect()
    gc.freeze()


def main(argv: list[str] | None = None) -> int:
    """Run the engine; the exit status."""
    parser = argparse.ArgumentParser(prog="ep_runtime.engine.main", description="engine of one rank; started by its supervisor")
    parser.add_argument("--control-fd", type=int, required=True, help="socket to the supervisor")
    parser.add_argument("--device-index", type=int, default=0, help="CUDA device of this rank")
    parser.add_argument("--local-ranks", type=int, default=1, help="ranks on this host, which share its memory")
    parser.add_argument("--runtime-dir", type=Path, required=True, help="private folder for sockets")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s", stream=sys.stderr)
    control = MessageSocket(socket.socket(fileno=args.control_fd), ToEngineControl, peer="the supervisor")
    engine = Engine(control, device_index=args.device_index, local_ranks=args.local_ranks, runtime_dir=args.runtime_dir)
    try:
        engine.run()
    except Exception as error:
        if isinstance(error, ModelError | EpLinkLost):
            log.error("%s: %s", type(error).__name__, error)
        else:
            log.exception("engine ends")
        report(control, engine, error)
        return 1
    return 0


def report(control: MessageSocket, engine: Engine, error: Exception) -> None:
    """Tell the supervisor why this engine ends, if it still listens: its end may be the reason."""
    message = Report(rank=engine.rank, epoch=engine.epoch, error=type(error).__name__, message=str(error))
    try:
        control.send(message, SEND_TIMEOUT_S)
    except EpLinkLost as lost:
        log.error("the report could not be sent: %s", lost)


if __name__ == "__main__":
    sys.exit(main())
