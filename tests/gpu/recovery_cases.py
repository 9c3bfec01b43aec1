"""What ranks run in the tests of leaving a group on GPUs."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from typing import Any

import torch

from ep_runtime.engine.comm import GroupCommunicator, form_group
from ep_runtime.engine.resident import Resident
from tests.distributed.comm_cases import exchange_of
from tests.support.rank_context import RankContext

KEPT_BYTES = 1 << 28
ROUNDS = 20


def group_of(ctx: RankContext, epoch: int) -> GroupCommunicator:
    """This epoch's group, on the rank's own device."""
    device = torch.device("cuda", ctx.rank)
    torch.cuda.set_device(device)
    return form_group(
        f"{ctx.store_host}:{ctx.store().port}",
        epoch=epoch,
        rank=ctx.rank,
        world=ctx.world,
        device=device,
        host="127.0.0.1",
        timeout_s=60.0,
        check=lambda: None,
    )


def leave_a_dead_peer(ctx: RankContext, *, rows: int, shared: bool) -> dict[str, Any] | None:
    """Rank 1 is killed; rank 0 leaves with a sum in flight, over NCCL or in peer memory: how, and what its device is then."""
    kept = torch.full((KEPT_BYTES,), 7, dtype=torch.uint8, device=f"cuda:{ctx.rank}")
    group = group_of(ctx, 0)
    if shared:
        resident = Resident()
        group.join_peers(exchange_of(ctx), resident.peers(ctx.rank, ctx.world, kept.device, torch.float32))
    partial = torch.ones(rows, 512, device=kept.device)
    reduce = group.reduce
    if shared:
        from kernels.peer_sums import reduce_rows

        memory = group.peers
        assert memory is not None

        def reduce(partial: torch.Tensor) -> torch.Tensor:
            return reduce_rows(memory, partial)

    for _ in range(ROUNDS):
        assert bool((reduce(partial) == ctx.world).all())
    if ctx.rank == 1:
        ctx.store().set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    peer = int(ctx.store().get("pid"))
    while os.path.exists(f"/proc/{peer}") and _state(peer) not in "ZX":
        time.sleep(0.01)
    reduce(partial)
    done = torch.cuda.Event()
    done.record()
    time.sleep(0.5)
    in_flight = not done.query()
    started = time.monotonic()
    group.close()
    seconds = time.monotonic() - started
    product = torch.eye(64, device=kept.device) @ torch.eye(64, device=kept.device)
    return {
        "in_flight": in_flight,
        "seconds": seconds,
        "done": done.query(),
        "kept": bool((kept == 7).all()),
        "works": bool((product == torch.eye(64, device=kept.device)).all()),
    }


def _state(pid: int) -> str:
    """The letter of a process's state; X when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def keep_a_graph(ctx: RankContext, *, epochs: int) -> list[list[float]]:
    """A graph that sums through peer memory, captured in the first epoch and replayed in each: its sums."""
    resident = Resident()
    device = torch.device("cuda", ctx.rank)
    partial = torch.zeros(4, 256, device=device)
    graph: torch.cuda.CUDAGraph | None = None
    sums = []
    exchange = exchange_of(ctx)
    for epoch in range(epochs):
        with closing(group_of(ctx, epoch)) as group:
            group.join_peers(exchange, resident.peers(ctx.rank, ctx.world, device, torch.float32))
            from kernels.peer_sums import reduce_rows

            memory = group.peers
            assert memory is not None
            if graph is None:
                reduce_rows(memory, partial)  # compiles
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    out = reduce_rows(memory, partial)
            for number in range(3):
                partial.fill_(100 * epoch + 10 * number + ctx.rank)
                graph.replay()
                sums.append([float(out.min()), float(out.max())])
            exchange(b"")  # nobody leaves while another still sums
    return sums
