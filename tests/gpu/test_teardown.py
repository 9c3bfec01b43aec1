"""Device memory is back at its start value after teardown, and dummy weights have the same bits on every device."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from model.folder import read_manifest
from model.loading.materialise import materialise, release
from model.loading.sources import DummySource, FileSource
from model.pieces import Piece, WeightMap
from model.spec import CacheSpec, LayerKind, ModelSpec, StateSpec
from model.state.checksum import checksum
from model.state.registry import StateRegistry
from tests.support.state_sections import sections_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SPEC = ModelSpec(
    architecture="Hybrid",
    family="hybrid",
    vocab_size=100,
    hidden_size=32,
    num_layers=2,
    layer_kinds=(LayerKind.LINEAR, LayerKind.FULL),
    caches=(CacheSpec(layer=1, kv_heads=2, head_dim=64),),
    states=(StateSpec(layer=0, name="conv", shape=(64, 3)), StateSpec(layer=0, name="h", shape=(8, 64, 64), dtype="float32")),
    max_positions=4096,
)


def make_state(device: torch.device | str) -> StateRegistry:
    return StateRegistry(SPEC, max_slots=64, num_blocks=512, block_size=16, dtype=torch.bfloat16, device=device)


def meta_module(layers: int, dtype: torch.dtype) -> tuple[nn.Module, WeightMap]:
    names = [f"layer{number}" for number in range(layers)]
    parameters = {name: nn.Parameter(torch.empty(1024, 512, dtype=dtype, device="meta"), False) for name in names}
    return nn.ParameterDict(parameters), WeightMap(pieces={name: (Piece(name=name, shape=(1024, 512)),) for name in names})


def test_memory_returns_to_its_start_value(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    saved = {f"layer{number}": torch.randn(1024, 512) for number in range(4)}
    save_file(saved, tmp_path / "model.safetensors")
    torch.zeros(1, device=device)
    gc.collect()
    start = torch.cuda.memory_allocated(device)
    module, pieces = meta_module(4, torch.float32)
    with FileSource(tmp_path, read_manifest(tmp_path)) as source:
        written = materialise(module, pieces, source, device=device)
    state = make_state("cuda")
    assert state.device == device
    assert torch.cuda.memory_allocated(device) >= start + written + state.nbytes
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.cpu(), saved[name])
    del parameter
    state.digest([(0, 100, list(range(7)))])
    state.close()
    assert torch.cuda.memory_allocated(device) <= start + written + 4 * 512
    release(module)
    assert torch.cuda.memory_allocated(device) == start


def test_dummy_weights_and_digests_have_the_same_bits_as_on_the_cpu() -> None:
    device = torch.device("cuda", 0)
    piece = Piece(name="layer0", shape=(1024, 512), source=(slice(10, 900),))
    assert torch.equal(DummySource(3, device).read(piece).cpu(), DummySource(3, torch.device("cpu")).read(piece))
    one, other = make_state("cpu"), make_state(device)
    for here, there in ((one.kv(1)[0], other.kv(1)[0]), (one.recurrent(0, "h"), other.recurrent(0, "h"))):
        here.normal_(generator=torch.Generator().manual_seed(1))
        there.copy_(here)
    extents = [(0, 100, list(range(7))), (5, 0, None)]
    assert one.digest(extents) == other.digest(extents)
    other.recurrent(0, "h")[5, 7, 63, 63] += 1
    assert one.digest(extents) != other.digest(extents)
    for slots in (list(range(64)), [63, 5], [5]):
        one.recurrent(0, "h").copy_(other.recurrent(0, "h"))
        assert sections_of(one, slots) == sections_of(other, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_checksums_have_the_same_bits_as_on_the_cpu(dtype: torch.dtype) -> None:
    for shape in ((7, 3, 5), (300, 70), (2, 3_000_001), (48, 128, 8)):
        tensor = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(4)).to(dtype)
        assert int(checksum(tensor)) == int(checksum(tensor.cuda()))


def test_what_a_digest_launches_does_not_depend_on_the_slots() -> None:
    state = make_state("cuda")
    sections_of(state, [0])
    counts = []
    for slots in ([5], list(range(64))):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            state.section_sums(slots)
            torch.cuda.synchronize()
        counts.append(sum(event.device_type.name == "CUDA" for event in profile.events()))
    assert counts[0] == counts[1] <= 60
