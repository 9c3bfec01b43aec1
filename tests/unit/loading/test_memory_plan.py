"""The memory plan, by hand-computed numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model.errors import MemoryPlanError
from model.memory import GIB, HOST_CACHE_LIMIT, RESERVE, DeviceMemory, Needs, device_memory, plan_memory, scratch_bytes
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
NEEDS = Needs(dtype="bfloat16", weight_bytes=10 << 20, block_size=16, max_num_batched_tokens=512, max_model_len=1000, max_slots=8)
SCRATCH = 512 * 64 * (16 + 8) * 2 + 2 * (8 + 256) * 1000 * 4


def gpu(total: int, used: int = 0) -> DeviceMemory:
    return DeviceMemory("cuda", total, used)


def test_scratch_is_the_documented_sum() -> None:
    assert scratch_bytes(ATTENTION, NEEDS, 8) == SCRATCH


def test_blocks_take_what_is_left() -> None:
    # 63 blocks hold one sequence of 1000; leave room for 100 blocks and a half.
    room = 100 * BLOCK + BLOCK // 2
    total = (10 << 20) + SCRATCH + RESERVE["cuda"] + room
    plan = plan_memory(ATTENTION, NEEDS, gpu(total), 1.0)
    assert plan.num_blocks == 100
    assert plan.max_slots == 8
    assert plan.budget == total
    assert plan.planned == total - BLOCK // 2
    assert dict(plan.lines)["weights"] == 10 << 20
    assert [size for _, size in plan.lines] == [10 << 20, 100 * BLOCK, 0, SCRATCH, RESERVE["cuda"]]


def test_utilization_and_what_others_use_come_off_the_total() -> None:
    need = (10 << 20) + SCRATCH + RESERVE["cuda"] + 100 * BLOCK
    plan = plan_memory(ATTENTION, NEEDS, gpu(2 * (need + 5 * BLOCK), 5 * BLOCK), 0.5)
    assert plan.budget == need
    assert plan.num_blocks == 100


def test_no_more_blocks_than_all_slots_can_fill() -> None:
    assert plan_memory(ATTENTION, NEEDS, gpu(100 * GIB), 0.9).num_blocks == 8 * 63


def test_states_are_counted_for_every_slot() -> None:
    plan = plan_memory(HYBRID, NEEDS, gpu(2 * GIB), 1.0)
    assert [size for what, size in plan.lines if what.startswith("recurrent")] == [8 * SLOT]


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
        (NEEDS, (10 << 20) + SCRATCH + RESERVE["cuda"] + 40 * BLOCK, "max_model_len of 640"),
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
    memory = gpu((10 << 20) + SCRATCH + RESERVE["cuda"] + 40 * BLOCK + 5)
    assert plan_memory(ATTENTION, replace(NEEDS, max_model_len=640), memory, 1.0).num_blocks == 40
    with pytest.raises(MemoryPlanError):
        plan_memory(ATTENTION, replace(NEEDS, max_model_len=641), memory, 1.0)


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
