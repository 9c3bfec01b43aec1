"""What a rank will allocate, put together for the memory plan: from the configuration, the prepared model and the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_runtime.engine import host_memory
from model.memory import Needs

if TYPE_CHECKING:
    import torch

    from ep_runtime.config import RuntimeConfig
    from model.loader import PreparedModel


def memory_needs(config: RuntimeConfig, prepared: PreparedModel, dtype: torch.dtype, max_model_len: int) -> Needs:
    """The plan's input for this rank."""
    rank, world = prepared.parallel.rank, prepared.parallel.world
    one_host = config.coordinator_host is None
    kind = prepared.device.type
    kernels = kind == "cuda" and config.forward_mode != "reference"
    static = kernels and prepared.module.static_decode(config.block_size)
    return Needs(
        config=prepared.config,
        dtype=str(dtype).removeprefix("torch."),
        weight_bytes=prepared.weight_bytes,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens or 0,
        max_model_len=max_model_len,
        max_slots=config.max_num_seqs,
        num_blocks=config.num_blocks,
        world=world,
        held=len(prepared.placement.local(rank)),
        head=rank == 0,
        kernels=static,
        graphs=static and config.forward_mode == "graph",
        shared=shared_lines(kind, world, one_host=one_host, kernels=kernels),
    )


def shared_lines(kind: str, world: int, *, one_host: bool, kernels: bool) -> tuple[tuple[str, int], ...]:
    """This rank's part of the memory that ranks of one host share for their sums: see `peers` and `host_memory`."""
    if world == 1 or not one_host:
        return ()
    if kernels:
        from ep_runtime.engine.peers import BUFFER_BYTES

        return (("buffers that peers read", sum(BUFFER_BYTES.values())),)
    if kind == "cpu" and host_memory.available():
        return (("shared memory of the ranks", host_memory.COUNTER_BYTES + 2 * host_memory.HALF_BYTES),)
    return ()
