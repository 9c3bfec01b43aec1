"""The memory plan, by hand-computed numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels import experts, gated_delta, paged_attention
from model import scratch
from model.config import AttentionConfig, LayerConfig, ModelConfig, MoeConfig, RopeConfig, RopeKind
from model.errors import MemoryPlanError
from model.memory import (
    GIB,
    GRAPH_BYTES,
    HOST_CACHE_LIMIT,
    RESERVE,
    DeviceMemory,
    Needs,
    device_memory,
    largest_step,
    plan_memory,
    scratch_bytes,
)
from model.spec import CacheSpec, LayerKind, ModelSpec, StateSpec

ATTENTION = ModelSpec(
    architecture="A",
    family="a",
    vocab_size=1000,
    hidden_size=64,
    num_layers=2,
    layer_kinds=(LayerKind.FULL, LayerKind.FULL),
    caches=(CacheSpec(layer=0, kv_heads=2, head_dim=16), CacheSpec(layer=1, kv_heads=2, head_dim=16)),
    experts_per_token=2,
    max_positions=4096,
)
# A block of 16 positions in bfloat16: 2 layers x 2 tensors x 16 x 2 x 16 elements x 2 B.
BLOCK = 2 * 2 * 16 * 32 * 2
HYBRID = replace(ATTENTION, states=(StateSpec(layer=0, name="h", shape=(1024, 64), dtype="float32"),))
SLOT = 1024 * 64 * 4
CONFIG = ModelConfig(
    architecture="A",
    family="a",
    dtype="bfloat16",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    layers=(LayerConfig(kind=LayerKind.FULL, sparse=False),) * 2,
    attention=AttentionConfig(heads=2, kv_heads=2, head_dim=16),
    rope=RopeConfig(kind=RopeKind.DEFAULT, rotary_dim=16, theta=1e4),
    norm_eps=1e-6,
    tied=False,
    max_positions=4096,
)
NEEDS = Needs(
    step_bytes=partial(scratch.step_bytes, CONFIG),
    dtype="bfloat16",
    weight_bytes=10 << 20,
    block_size=16,
    max_num_batched_tokens=512,
    max_model_len=1000,
    max_slots=8,
)
# 512 rows carry three hidden vectors, rotary tables and indices. Of the phases the sampler is the worst: float32 logits of 8 + 256
# rows, picked and copied ones of 8, and 72 B for each logit that it works on, here all of them.
CARRIED = 512 * (64 * 2 * 3 + 6 * 16 * 4 + 128)
SCRATCH = CARRIED + 4 * (264 + 2 * 8) * 1000 + 72 * 264 * 1000
SAMPLER = 4 * 1000 + 5 * 1000 * 8
FIXED = (10 << 20) + SCRATCH + SAMPLER


def gpu(total: int, used: int = 0) -> DeviceMemory:
    return DeviceMemory("cuda", total, used)


def test_scratch_is_the_documented_sum() -> None:
    assert scratch_bytes(ATTENTION, NEEDS, 8) == SCRATCH


def test_a_rank_that_does_not_sample_plans_no_sampler() -> None:
    worker = replace(NEEDS, head=False, world=2)
    # The worst phase is now the attention of one prompt piece: 2 hidden vectors, the projection and three outputs, four rotated
    # vectors of each row; keys and values of 1008 positions, and masks of 512 rows by 1008.
    attention = 512 * (2 * 64 * 2 + 2 * (96 + 3 * 32) + 2 * 4 * 64) + 1008 * (2 * 32 * 2 + 512 * 5 + 16)
    assert scratch_bytes(ATTENTION, worker, 8) == CARRIED + attention
    assert not [what for what, _ in plan_memory(ATTENTION, worker, gpu(2 * GIB), 1.0).lines if "sampler" in what]


def test_a_step_is_bounded_by_its_model() -> None:
    """Rows that one step may score, and pairs of experts that a rank may hold."""
    whole = replace(ATTENTION, single_chunk=True)
    assert scratch_bytes(whole, NEEDS, 8) - SCRATCH == 4 * 256 * 1000 + 72 * 256 * 1000
    moe = replace(CONFIG, moe=MoeConfig(num_experts=64, top_k=8, intermediate=4096, normalise=True))
    sparse = replace(
        NEEDS,
        step_bytes=partial(scratch.step_bytes, replace(moe, layers=(LayerConfig(kind=LayerKind.FULL, sparse=True),))),
        head=False,
    )
    few, many = (scratch_bytes(ATTENTION, replace(sparse, held=held), 8) for held in (1, 64))
    assert many - few == 512 * 2 * 3 * 7 * 64 + 63 * 64


def test_what_a_rank_gathers_grows_with_the_ranks() -> None:
    """Beside four vectors in bfloat16 and three in float32 a row of 64 has a part of each rank. A worker has its own logits."""
    for world in (2, 3, 8):
        size = replace(largest_step(ATTENTION, replace(NEEDS, world=world, head=False), 8, "cpu"), rows=500)
        assert scratch.norm_row(64, size) == 64 * (2 * (world + 4) + 12)
        # Three of 264 rows of logits in bfloat16 and one in float32, of which it has a part.
        assert scratch.logit_bytes(1000, size) == 264 * 1000 * 10 // world


def test_the_bounds_are_those_of_the_code_that_keeps_them() -> None:
    assert scratch.GATHERED == paged_attention.GATHER_ELEMENTS
    assert scratch.TILE == paged_attention.QUERY_TILE
    assert scratch.CHUNK == gated_delta.CHUNK
    assert scratch.DENSE_ROWS == experts.DENSE_ROWS


def test_graphs_buffers_and_tables_have_lines() -> None:
    needs = replace(NEEDS, kernels=True, graphs=True, shared=(("buffers that peers read", 192 << 20),))
    lines = {what.split(",")[0]: size for what, size in plan_memory(ATTENTION, needs, gpu(3 * GIB), 1.0).lines}
    assert lines["buffers that peers read"] == 192 << 20
    assert lines["block tables"] == 4 * 8 * 63
    # Steps of 1, 2, 4 and 8 rows keep their logits; the temporaries are those of a step of 8 rows.
    # Its worst phase is attention: two hidden vectors, projection and two outputs of 8 rows, and split sums of 16 packed rows.
    step = 8 * 896 + 8 * (2 * 64 * 2 + 2 * (96 + 2 * 32)) + (256 + 8 * 2) * 16 * (16 + 2) * 4
    assert lines["graphs of 4 decode steps (estimate)"] == step + 4 * 1000 * 15 + 4 * GRAPH_BYTES


def test_blocks_take_what_is_left() -> None:
    # 63 blocks hold one sequence of 1000; leave room for 100 blocks and a half.
    room = 100 * BLOCK + BLOCK // 2
    total = FIXED + RESERVE["cuda"] + room
    plan = plan_memory(ATTENTION, NEEDS, gpu(total), 1.0)
    assert plan.num_blocks == 100
    assert plan.max_slots == 8
    assert plan.budget == total
    assert plan.planned == total - BLOCK // 2
    assert dict(plan.lines)["weights"] == 10 << 20
    assert [size for _, size in plan.lines] == [10 << 20, 100 * BLOCK, 0, SCRATCH, SAMPLER, RESERVE["cuda"]]


def test_utilization_and_what_others_use_come_off_the_total() -> None:
    need = FIXED + RESERVE["cuda"] + 100 * BLOCK
    plan = plan_memory(ATTENTION, NEEDS, gpu(2 * (need + 5 * BLOCK), 5 * BLOCK), 0.5)
    assert plan.budget == need
    assert plan.num_blocks == 100


def test_no_more_blocks_than_all_slots_can_fill() -> None:
    assert plan_memory(ATTENTION, NEEDS, gpu(100 * GIB), 0.9).num_blocks == 8 * 63


def test_states_are_counted_for_every_slot() -> None:
    plan = plan_memory(HYBRID, NEEDS, gpu(2 * GIB), 1.0)
    assert [size for what, size in plan.lines if what.startswith("recurrent")] == [8 * SLOT]


def test_an_owner_of_sequences_keeps_the_states_of_its_part_of_the_slots() -> None:
    """Of 9 slots two owners have 5 at most; blocks are as many as these can fill, and block tables are theirs."""
    needs = replace(NEEDS, max_slots=9, owners=2, world=2, kernels=True, graphs=True)
    plan = plan_memory(HYBRID, needs, gpu(4 * GIB), 1.0)
    lines = {what.split(",")[0]: size for what, size in plan.lines}
    assert (lines["recurrent state"], plan.num_blocks, lines["block tables"]) == (5 * SLOT, 5 * 63, 4 * 5 * 63)
    assert lines["sampler"] == 4 * 1000 + 5 * 1000 * 9
    memory = gpu((10 << 20) + RESERVE["cuda"] + (50 << 20))
    assert plan_memory(HYBRID, replace(NEEDS, max_slots=None, owners=2), memory, 1.0).max_slots == 128


def test_slots_are_halved_until_their_states_fit_half_of_what_is_left() -> None:
    # 256 slots are 64 MiB of state; what the weights and the reserve leave here is 50 MiB, half of it 25 MiB.
    memory = gpu((10 << 20) + RESERVE["cuda"] + (50 << 20))
    assert plan_memory(HYBRID, replace(NEEDS, max_slots=None), memory, 1.0).max_slots == 64
    assert plan_memory(ATTENTION, replace(NEEDS, max_slots=None), memory, 1.0).max_slots == 256


def test_a_cpu_cache_is_bounded() -> None:
    wide = replace(ATTENTION, caches=(CacheSpec(layer=0, kv_heads=16, head_dim=1024),))
    block = 2 * 16 * 16 * 1024 * 2
    memory = DeviceMemory("cpu", 64 * GIB, 0)
    assert plan_memory(wide, replace(NEEDS, max_slots=256), memory, 0.9).num_blocks == HOST_CACHE_LIMIT // block
    long = replace(NEEDS, max_slots=256, max_model_len=16 * (HOST_CACHE_LIMIT // block + 10))
    assert plan_memory(wide, long, memory, 0.9).num_blocks == HOST_CACHE_LIMIT // block + 10


def test_given_blocks_are_kept() -> None:
    assert plan_memory(ATTENTION, replace(NEEDS, num_blocks=70), gpu(2 * GIB), 1.0).num_blocks == 70


def test_a_model_without_caches_still_gets_block_numbers() -> None:
    plan = plan_memory(replace(HYBRID, caches=()), NEEDS, gpu(2 * GIB), 1.0)
    assert plan.num_blocks == 8 * 63


@pytest.mark.parametrize(
    ("needs", "total", "message"),
    [
        (NEEDS, FIXED + RESERVE["cuda"] + 40 * BLOCK, "max_model_len of 640"),
        (NEEDS, 1 << 20, "at any max_model_len"),
        (replace(NEEDS, num_blocks=10), 2 * GIB, "10 blocks of 16 hold 160 positions, but max_model_len is 1000"),
        (replace(NEEDS, num_blocks=10**6), 2 * GIB, "does not fit"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sum(needs: Needs, total: int, message: str) -> None:
    with pytest.raises(MemoryPlanError, match=message) as caught:
        plan_memory(ATTENTION, needs, gpu(total), 1.0)
    text = str(caught.value)
    for word in ("weights", "KV cache", "recurrent state", "scratch", "reserve", "total", "budget"):
        assert word in text


def test_the_largest_length_named_in_a_refusal_fits() -> None:
    memory = gpu(FIXED + RESERVE["cuda"] + 40 * BLOCK + 5)
    assert plan_memory(ATTENTION, replace(NEEDS, max_model_len=640), memory, 1.0).num_blocks == 40
    with pytest.raises(MemoryPlanError):
        plan_memory(ATTENTION, replace(NEEDS, max_model_len=1000), memory, 1.0)


def test_table_adds_up() -> None:
    plan = plan_memory(ATTENTION, NEEDS, gpu(3 * GIB), 1.0)
    rows = [line.rsplit(None, 2) for line in plan.table().splitlines()]
    sizes = {row[0].strip(): float(row[1]) for row in rows}
    assert sizes["budget"] == 3.0
    assert sizes["total"] == pytest.approx(sum(sizes.values()) - sizes["total"] - sizes["budget"], abs=0.005)


def test_host_memory_is_shared_among_local_ranks() -> None:
    alone, shared = device_memory(torch.device("cpu")), device_memory(torch.device("cpu"), 4)
    assert alone.used == shared.used == 0
    assert 0 < shared.total < alone.total
