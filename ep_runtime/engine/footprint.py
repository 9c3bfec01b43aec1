"""What a rank will allocate, put together for the memory plan: from the configuration, the prepared model and the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_runtime.engine import host_memory
from model.memory import Needs
from model.vision.scratch import tower_scratch

if TYPE_CHECKING:
    import torch

    from ep_runtime.config import RuntimeConfig
    from model.loader import PreparedModel
    from model.spec import ModelSpec

MOST_IMAGE_TOKENS = 16384
"""Of images at once when nothing else is asked for: a picture of 16 megapixels, with patches of 16 pixels."""


def memory_needs(
    config: RuntimeConfig, prepared: PreparedModel, dtype: torch.dtype, max_model_len: int, *, owners: int = 1
) -> Needs:
    """The plan's input for this rank."""
    rank, world = prepared.parallel.rank, prepared.parallel.world
    one_host = config.coordinator_host is None
    kind = prepared.device.type
    kernels = kind == "cuda" and config.forward_mode != "reference"
    static = kernels and prepared.module.static_decode(config.block_size)
    return Needs(
        step_bytes=prepared.step_bytes,
        dtype=str(dtype).removeprefix("torch."),
        weight_bytes=prepared.weight_bytes,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens or 0,
        max_model_len=max_model_len,
        max_slots=config.max_num_seqs,
        num_blocks=config.num_blocks,
        world=world,
        owners=owners,
        held=len(prepared.placement.local(rank)),
        head=rank == 0,
        kernels=static,
        graphs=static and config.forward_mode == "graph",
        images=image_lines(config, prepared, dtype, max_model_len),
        shared=shared_lines(kind, world, one_host=one_host, kernels=kernels),
    )


def image_tokens(config: RuntimeConfig, spec: ModelSpec, max_model_len: int) -> int:
    """Rows of images that all slots hold at most, and one prompt has; 0 for a model without vision."""
    if spec.vision is None:
        return 0
    return config.max_image_tokens or min(max_model_len, MOST_IMAGE_TOKENS)


def image_cache_bytes(config: RuntimeConfig, rows: int, row_bytes: int) -> int:
    """Bytes of encoded images that the head keeps: as configured, but the `rows` of one prompt at least."""
    return max(config.image_cache_bytes or 0, rows * row_bytes)


def image_lines(
    config: RuntimeConfig, prepared: PreparedModel, dtype: torch.dtype, max_model_len: int
) -> tuple[tuple[str, int], ...]:
    """What images take: rows on every rank, and on the head what it encodes with, keeps, and puts together for a VISION."""
    rows = image_tokens(config, prepared.spec, max_model_len)
    tower = prepared.config.vision
    if not rows or tower is None:
        return ()
    row = tower.row_width * dtype.itemsize
    held = ((f"image rows, {rows} of {row:,} B", rows * row),)
    if prepared.parallel.rank != 0:
        return held
    patches = rows * tower.merge**2
    kept = image_cache_bytes(config, rows, row)
    return (
        *held,
        (f"encoded images, {kept // row} rows kept and {rows} to send", kept + rows * row),
        (f"vision tower, {patches} patches at once", tower_scratch(tower, patches, dtype.itemsize) + patches * tower.patch_width),
    )


def shared_lines(kind: str, world: int, *, one_host: bool, kernels: bool) -> tuple[tuple[str, int], ...]:
    """This rank's part of the memory that ranks of one host share for their sums: see `peers` and `host_memory`."""
    if world == 1 or not one_host:
        return ()
    if kernels:
        from ep_runtime.engine.peers import BUFFER_BYTES, shared_bytes

        return (("buffers that peers read", sum(sum(shared_bytes(use, world)) for use in BUFFER_BYTES)),)
    if kind == "cpu" and host_memory.available():
        return (("shared memory of the ranks", host_memory.COUNTER_BYTES + 2 * host_memory.HALF_BYTES),)
    return ()
