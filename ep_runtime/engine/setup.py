"""What the head derives once from the configuration and the model, before its first plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_runtime.engine.graphs import buckets_up_to
from ep_runtime.engine.vision.cost import slice_cost
from ep_runtime.engine.vision.encoder import ImageEncoder
from ep_runtime.scheduler.core import SchedulerLimits
from model.config import ModelConfig
from model.scratch import scored_rows
from model.share import share

if TYPE_CHECKING:
    from ep_runtime.engine.executor import Executor
    from ep_runtime.engine.rank import RankModel
    from protocol.slots import SlotLimits


def scheduler_limits(rank: RankModel, limits: SlotLimits) -> SchedulerLimits:
    """The scheduler's bounds: the slot table's, and what the model's spec and the configuration add."""
    config, spec = rank.config, rank.spec
    return SchedulerLimits(
        max_slots=limits.max_slots,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_model_len=limits.max_length,
        max_batch_tokens=limits.max_rows,
        max_queue=config.max_queue,
        eos_token_ids=spec.eos_token_ids,
        prefix_cache=config.enable_prefix_caching and spec.rewindable,
        chunk_multiple=spec.cut_points,
        single_chunk=spec.single_chunk,
        max_scored_rows=scored_rows(spec.cut_points, spec.single_chunk, limits.max_rows),
        max_image_tokens=rank.max_image_tokens,
        max_loops=spec.max_loops,
        owners=limits.owners,
    )


def image_encoder(rank: RankModel, executor: Executor) -> ImageEncoder | None:
    """The head's encoder for one epoch, None for a model without vision."""
    tower, vision, config = rank.loaded.tower, rank.spec.vision, rank.loaded.config
    if tower is None or vision is None or rank.images is None:
        return None
    assert isinstance(config, ModelConfig), "towers belong to decoders"
    return ImageEncoder(
        tower,
        vision,
        rank.images,
        rank.device,
        slice_cost=slice_cost(share(config), rank.config.max_num_batched_tokens or 1, rank.parallel.world),
        pass_rows=rank.max_image_tokens,
        offer=executor.offer_rows,
    )


def warm_buckets(rank: RankModel) -> list[int]:
    """Row counts that WARM prepares."""
    return buckets_up_to(rank.plan.max_slots)
