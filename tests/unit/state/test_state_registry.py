"""The registry: what it allocates, copies, digests and gives back, with values set by hand."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model.spec import CacheSpec, LayerKind, ModelSpec, StateSpec
from model.state.checksum import checksum, checksum_rows, combine
from model.state.registry import SlotExtent, StateRegistry, bytes_per_block, bytes_per_slot
from tests.support.state_sections import sections_of

SPEC = ModelSpec(
    architecture="Hybrid",
    family="hybrid",
    vocab_size=100,
    hidden_size=32,
    num_layers=3,
    layer_kinds=(LayerKind.LINEAR, LayerKind.FULL, LayerKind.SLIDING),
    caches=(CacheSpec(layer=1, kv_heads=2, head_dim=8), CacheSpec(layer=2, kv_heads=1, head_dim=4, window=8)),
    states=(
        StateSpec(layer=0, name="conv", shape=(6, 3)),
        StateSpec(layer=0, name="h", shape=(2, 4, 4), dtype="float32"),
        StateSpec(layer=2, name="count", shape=(), dtype="int64"),
    ),
    max_positions=64,
)


def make(dtype: torch.dtype = torch.bfloat16, spec: ModelSpec = SPEC) -> StateRegistry:
    return StateRegistry(spec, max_slots=4, num_blocks=6, block_size=4, dtype=dtype, device="cpu")


def randomised(seed: int = 0) -> StateRegistry:
    state = make()
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(state):
        if tensor.dtype == torch.int64:
            tensor.random_(generator=generator)
        else:
            tensor.normal_(generator=generator)
    return state


def tensors(state: StateRegistry) -> list[torch.Tensor]:
    return [*state.kv(1), *state.kv(2), state.recurrent(0, "conv"), state.recurrent(0, "h"), state.recurrent(2, "count")]


def test_allocates_what_the_spec_declares() -> None:
    state = make()
    shapes = [(6, 4, 2, 8), (6, 4, 2, 8), (6, 4, 1, 4), (6, 4, 1, 4), (4, 6, 3), (4, 2, 4, 4), (4,)]
    dtypes = [torch.bfloat16] * 5 + [torch.float32, torch.int64]
    assert [tuple(tensor.shape) for tensor in tensors(state)] == shapes
    assert [tensor.dtype for tensor in tensors(state)] == dtypes
    assert all(not tensor.any() for tensor in tensors(state))
    assert state.nbytes == sum(tensor.nbytes for tensor in tensors(state))
    assert state.nbytes == 6 * bytes_per_block(SPEC, 4, "bfloat16") + 4 * bytes_per_slot(SPEC, "bfloat16")
    state.check_integrity()


def test_a_model_may_keep_nothing_or_only_one_kind() -> None:
    bare = make(spec=replace(SPEC, caches=(), states=()))
    assert bare.nbytes == 0
    bare.zero_slot(0)
    bare.copy_blocks([(0, 1)])
    assert bare.digest([(0, 0, None), (1, 4, [3])]) == 0
    bare.check_integrity()


def test_zero_and_copy_touch_one_slot() -> None:
    state = randomised()
    before = {name: state.recurrent(*name).clone() for name in ((0, "conv"), (0, "h"), (2, "count"))}
    state.zero_slot(1)
    state.copy_slot(2, 3)
    for name, old in before.items():
        new = state.recurrent(*name)
        assert torch.equal(new[0], old[0])
        assert not new[1].any()
        assert torch.equal(new[2], old[2])
        assert torch.equal(new[3], old[2])


def test_blocks_are_copied_in_all_layers_at_once() -> None:
    state = randomised()
    before = [tensor.clone() for layer in (1, 2) for tensor in state.kv(layer)]
    state.copy_blocks([(0, 1), (1, 2), (5, 0)])
    for old, new in zip(before, [tensor for layer in (1, 2) for tensor in state.kv(layer)], strict=True):
        assert torch.equal(new, old[[5, 0, 1, 3, 4, 5]])


@pytest.mark.parametrize("pairs", [[(0, 6)], [(-1, 2)], [(0, 2), (1, 2)]])
def test_bad_block_pairs_change_nothing(pairs: list[tuple[int, int]]) -> None:
    state = randomised()
    before = [tensor.clone() for tensor in tensors(state)]
    with pytest.raises(ValueError, match="block pairs"):
        state.copy_blocks(pairs)
    assert all(torch.equal(old, new) for old, new in zip(before, tensors(state), strict=True))


@pytest.mark.parametrize("slot", [-1, 4])
def test_slots_out_of_range_are_refused(slot: int) -> None:
    state = make()
    for use in (lambda: state.zero_slot(slot), lambda: state.copy_slot(0, slot), lambda: state.digest([(slot, 0, None)])):
        with pytest.raises(ValueError, match=f"slot {slot}"):
            use()


def test_equal_bits_give_equal_digests_wherever_they_lie() -> None:
    one, other = randomised(7), randomised(7)
    extents = [SlotExtent(0, 7, [3, 1]), SlotExtent(2, 0, None), SlotExtent(1, 3, [4])]
    assert one.digest(extents) == other.digest(extents)
    assert 0 <= one.digest(extents) < 2**64
    other.copy_slot(0, 3)
    other.copy_blocks([(3, 5), (1, 0)])
    assert one.digest([(0, 7, [3, 1])]) == other.digest([(3, 7, [5, 0])])
    assert one.digest(extents) != randomised(8).digest(extents)


def test_any_single_bit_of_what_is_covered_changes_the_digest() -> None:
    state = randomised()
    extents = [SlotExtent(0, 7, [3, 1]), SlotExtent(2)]
    base = state.digest(extents)
    covered = [
        *((tensor, (2, 1)) for tensor in (state.recurrent(0, "conv")[0], state.recurrent(0, "h")[2])),
        *((tensor[3, 3], (0, 3)) for tensor in (*state.kv(1), *state.kv(2))),
        *((tensor[1, 2], (0, 1)) for tensor in (*state.kv(1), *state.kv(2))),
    ]
    for view, place in covered:
        place = place if view.dim() == 2 else (1, 2, 3)
        bits = view.view({2: torch.int16, 4: torch.int32}[view.element_size()])
        for bit in range(8 * view.element_size() - 1):
            bits[place] ^= 1 << bit
            assert state.digest(extents) != base, (place, bit)
            bits[place] ^= 1 << bit
    state.recurrent(2, "count")[0] ^= 1 << 40
    assert state.digest(extents) != base
    state.recurrent(2, "count")[0] ^= 1 << 40
    assert state.digest(extents) == base


def test_what_is_not_covered_does_not_count() -> None:
    state = randomised()
    extents = [SlotExtent(0, 7, [3, 1, 2])]
    base = state.digest(extents)
    for keys, values in (state.kv(1), state.kv(2)):
        keys[1, 3] += 1  # position 7 of the sequence
        values[2] += 1  # a block past its length
        keys[0] += 1
    state.recurrent(0, "h")[1] += 1
    assert state.digest(extents) == base


def test_sign_of_zero_and_order_of_slots_count() -> None:
    state = randomised()
    assert state.digest([(0, 0, None), (1, 0, None)]) != state.digest([(1, 0, None), (0, 0, None)])
    state.recurrent(0, "h")[0, 0, 0, 0] = 0.0
    plus = state.digest([(0, 0, None)])
    state.recurrent(0, "h")[0, 0, 0, 0] = -0.0
    assert state.digest([(0, 0, None)]) != plus


def weight(place: int) -> int:
    mixed = (place * 0x9E3779B97F4A7C15) & (2**64 - 1)
    signed = mixed - 2**64 if mixed >> 63 else mixed
    return ((mixed ^ ((signed >> 31) & (2**64 - 1))) * 0xBF58476D1CE4E5B9 | 1) & (2**64 - 1)


def plain_checksum(rows: list[list[int]]) -> int:
    """Each word times the product of an inner and an outer odd weight, modulo 2^64, in Python integers."""
    width = len(rows[0])
    inner = [weight(1 + column) for column in range(width)]
    sums = [
        sum(value * inner[column] for column, value in enumerate(line)) * weight(1 + width + row) for row, line in enumerate(rows)
    ]
    return sum(sums) % 2**64


@pytest.mark.parametrize(
    ("shape", "dtype", "word"),
    [
        ((90, 200), torch.float32, "int32"),
        ((4, 6, 3), torch.bfloat16, "int32"),
        ((5, 3, 3), torch.bfloat16, "int16"),
        ((3, 7), torch.uint8, "uint8"),
        ((4,), torch.int64, "int32"),
    ],
    ids=str,
)
def test_checksum_is_the_sum_it_says(shape: tuple[int, ...], dtype: torch.dtype, word: str) -> None:
    draw = torch.Generator().manual_seed(5)
    tensor = torch.randint(-(2**62), 2**62, shape, generator=draw) if dtype == torch.int64 else torch.randn(shape, generator=draw)
    tensor = (tensor * 50).to(dtype)
    rows = tensor.reshape(shape[0], -1).view(torch.uint8).numpy().view(word).tolist()
    assert int(checksum(tensor)) % 2**64 == plain_checksum(rows)
    picked = torch.tensor([2, 0])
    for value, row in zip(checksum_rows(tensor, picked).tolist(), picked.tolist(), strict=True):
        assert value % 2**64 == sum(number * weight(1 + place) for place, number in enumerate(rows[row])) % 2**64


def test_a_tensor_that_does_not_start_at_a_word_has_the_checksum_of_its_bits() -> None:
    whole = torch.randn(41, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert int(checksum(whole[1:].view(4, 10))) == int(checksum(whole[1:].clone().view(4, 10)))


def test_a_matrix_and_its_transpose_differ() -> None:
    square = torch.randn(4, 4, generator=torch.Generator().manual_seed(6))
    assert int(checksum(square)) != int(checksum(square.T))


def test_large_tensors_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(50, 30, generator=torch.Generator().manual_seed(1))
    whole = combine([checksum(tensor)])
    for chunk in (64, 7):
        monkeypatch.setattr("kernels.checksum.CHUNK", chunk)
        assert combine([checksum(tensor)]) == whole


def test_sections_are_of_each_name_in_order_of_slots_whatever_their_numbers() -> None:
    state = randomised(3)
    base = sections_of(state, [0, 2])
    assert set(base) == {"conv", "h", "count"}
    state.copy_slot(2, 1)
    assert sections_of(state, [0, 1]) == base
    assert all(sections_of(state, [2, 0])[name] != value for name, value in base.items())
    state.recurrent(0, "h")[1] = -state.recurrent(0, "h")[1]  # two signs and more, which must not make up for each other
    assert {name for name, value in sections_of(state, [0, 1]).items() if value != base[name]} == {"h"}
    state.recurrent(0, "h")[3] += 1
    assert sections_of(state, [0, 2]) == base
    for bad in (-1, 4):
        with pytest.raises(ValueError, match=f"slot {bad}"):
            sections_of(state, [0, bad])


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_what_is_launched_for_sections_does_not_depend_on_the_slots() -> None:
    state = StateRegistry(SPEC, max_slots=128, num_blocks=1, block_size=4, dtype=torch.bfloat16, device="cpu")
    counts = []
    for slots in ([5], list(range(128))):
        with Calls() as calls:
            sums = state.section_sums(slots)
        assert all(value.shape == () for value in sums.values())
        counts.append(calls.count)
    assert counts[0] == counts[1]


def test_a_length_beyond_the_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="9 positions"):
        make().digest([(0, 9, [0, 1])])


def test_integrity_notices_another_tensor() -> None:
    state = make()
    state.recurrents._states[0, "h"] = state.recurrent(0, "h").double()
    with pytest.raises(RuntimeError, match="state h of layer 0"):
        state.check_integrity()
    state = make()
    state.paged._kv[2] = (state.kv(2)[0][:3], state.kv(2)[1])
    with pytest.raises(RuntimeError, match="keys of layer 2"):
        state.check_integrity()


def test_duplicate_declarations_are_refused() -> None:
    with pytest.raises(ValueError, match="same layer"):
        make(spec=replace(SPEC, caches=(SPEC.caches[0], SPEC.caches[0])))
    with pytest.raises(ValueError, match="same name"):
        make(spec=replace(SPEC, states=(SPEC.states[0], SPEC.states[0])))


def test_close_gives_every_tensor_back_newest_first() -> None:
    state = make()
    gone: list[int] = []
    for number, tensor in enumerate(tensors(state)):
        weakref.finalize(tensor, gone.append, number)
    del tensor
    gc.disable()
    try:
        state.close()
    finally:
        gc.enable()
    assert sorted(gone) == list(range(7))
    assert gone[:3] == [6, 5, 4]
    assert set(gone[3:5]) == {2, 3}
    assert state.nbytes == 0
    with pytest.raises(RuntimeError, match="holds layers"):
        state.check_integrity()
