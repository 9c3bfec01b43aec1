"""Rank functions for the tests of the rank pool itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import torch
import torch.distributed as dist

from tests.support.rank_context import RankContext


def describe(context: RankContext, **kwargs: object) -> dict:
    marker = context.runtime_dir / f"rank{context.rank}"
    marker.write_text("here")
    return {
        "rank": context.rank,
        "world": context.world,
        "epoch": context.epoch,
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "kwargs": kwargs,
        "same": kwargs == context.kwargs,
        "dir": str(context.runtime_dir),
    }


def arrays(context: RankContext, values: np.ndarray) -> dict:
    return {"doubled": values * 2, "empty": np.zeros((0, 3), np.float32), "scalar": values.sum(), "strided": values.T}


def gloo_sum(context: RankContext, factor: int) -> list[int]:
    context.init_gloo()
    tensor = torch.tensor([context.rank + 1, factor * (context.rank + 1)])
    dist.all_reduce(tensor)
    return tensor.tolist()


def store_exchange(context: RankContext) -> list[str]:
    store = context.store()
    store.set(f"from{context.rank}", f"epoch {context.epoch} rank {context.rank}")
    return [store.get(f"from{rank}").decode() for rank in range(context.world)]


def fail_on(context: RankContext, failing: list[int]) -> str:
    if context.rank in failing:
        print("some last words")
        raise ValueError(f"broken on purpose on rank {context.rank}")
    return "fine"


def fail_while_others_wait(context: RankContext) -> None:
    context.init_gloo()
    if context.rank == 1:
        raise ValueError("left the others alone")
    dist.barrier()


def die(context: RankContext, how: str) -> str:
    if context.rank == context.world - 1:
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exit":
            os._exit(7)
        raise SystemExit(0)
    return "alive"


def hang_here_forever(context: RankContext, rank: int) -> None:
    """The other ranks fail once this one is here."""
    store = context.store()
    if context.rank == rank:
        store.set("here", "")
        threading.Event().wait()
    store.wait(["here"])
    raise ValueError("does not wait")


def hang_in_collective(context: RankContext) -> None:
    context.init_gloo(timeout=600)
    if context.rank == 0:
        dist.broadcast(torch.zeros(1), src=1)
    threading.Event().wait()


def stop_itself(context: RankContext) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def not_plain_data(context: RankContext) -> object:
    return torch.zeros(2)


def leave_a_child(context: RankContext) -> int:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], stdin=subprocess.DEVNULL)
    print(f"child {child.pid} is running", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return child.pid
