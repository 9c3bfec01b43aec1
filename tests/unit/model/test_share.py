"""Heads divided among the ranks: logits stay transformers', each element of a weight is where it belongs, misfits are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model import share
from model.config import ModelConfig
from model.decoder import Decoder
from model.errors import UnsupportedModel
from model.families.registry import resolve, spec_of, weight_map
from model.loader import load_model, prepare_model
from model.parallel import Parallel
from model.state.sizes import bytes_per_block, bytes_per_slot
from model.trellis.checkpoint import config_to_json
from model.trellis.presets import PRESETS
from tests.support.batches import Part, Ranks, relative_error
from tests.support.checkpoints import clear_prompt, hf_logits, prompt, read_config
from tests.support.state_sections import sections_of
from tests.support.weights import load_rank, placed, read_tensors

FAMILIES = ("llama", "mixtral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
Checkpoint = Callable[[str, str], Path]


def load_part(path: Path, rank: int, world: int) -> Decoder:
    return load_rank(path, rank, world, split=True)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_sums_of_ranks_that_divide_the_heads(checkpoint: Checkpoint, family: str, world: int) -> None:
    """On four ranks two share each key/value head, and each key head of a DeltaNet layer."""
    path = checkpoint(family, "heads")
    ranks = Ranks(path, world, load=load_part)
    tokens = clear_prompt(path, 40)
    got = ranks.prompt(0, tokens[:37], chunk=19)
    rest = [ranks.logits(Part(0, [token])) for token in tokens[37:]]
    assert relative_error(torch.cat([got, *rest]), hf_logits(path, tokens)) < 1e-4
    layers = ranks.models[0].spec().num_layers
    for rank in ranks.group.ranks:
        assert rank.launched == (["reduce"] * 2 * layers + ["gather_to_head"]) * 5


def test_ranks_agree_in_every_bit_of_what_they_share_and_keep_their_own_states(checkpoint: Checkpoint) -> None:
    ranks = Ranks(checkpoint("qwen3_next", "heads"), 2, load=load_part)
    first, second = ranks.run(ranks.batch([Part(0, prompt(30)), Part(1, prompt(1))], hidden_rows=True, routing=True))
    for name in ("hidden", "routing", "inputs", "outputs"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    sections = [sections_of(state, [0, 1]) for state in ranks.states]
    assert sections == [{}, {}]
    assert not torch.equal(*(state.recurrent(0, "h")[0] for state in ranks.states))
    whole = Ranks(checkpoint("qwen3_next", "heads"), 1)
    whole.run(whole.batch([Part(0, prompt(30)), Part(1, prompt(1))]))
    parts = torch.cat([state.recurrent(0, "h")[0] for state in ranks.states])
    assert relative_error(parts, whole.states[0].recurrent(0, "h")[0]) < 1e-5
    assert set(sections_of(whole.states[0], [0])) == {"conv", "h"}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_is_read_by_the_ranks_that_have_its_head(checkpoint: Checkpoint, family: str, world: int) -> None:
    path = checkpoint(family, "heads")
    whole, placement = placed(path, world)
    config = share.split(whole, world)
    shapes = {name: tuple(tensor.shape) for name, tensor in read_tensors(path).items()}
    maps = [weight_map(config, placement, Parallel(rank, world), shapes) for rank in range(world)]
    counts = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    for rank_map in maps:
        for piece in (piece for pieces in rank_map.pieces.values() for piece in pieces):
            counts[piece.name][piece.source or ...] += 1
        read = {piece.name for pieces in rank_map.pieces.values() for piece in pieces}
        assert read | rank_map.foreign == shapes.keys()
    shared_heads = world // 2
    for name, count in counts.items():
        assert readers(name, count) == expected_readers(name, world, shared_heads), name


def readers(name: str, count: torch.Tensor) -> set[int]:
    """By how many ranks the elements are read; of keys and values in one tensor, those of the rest of it are left out."""
    return set(count.unique().tolist()) - ({1} if "in_proj_qkv" in name or "conv1d" in name else set())


def expected_readers(name: str, world: int, sharing: int) -> set[int]:
    """From what the tensor is: divided by query or value heads, by key heads that `sharing` ranks share, or whole everywhere."""
    last = name.removesuffix(".weight").rsplit(".", 1)[-1]
    by_heads = ("q_proj", "o_proj", "out_proj", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_ba", "A_log", "dt_bias", "lm_head")
    if ".experts." in name or last in by_heads or name.endswith(("q_proj.bias", "o_proj.bias")):
        return {1}
    if name.endswith(("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")):
        return {sharing}
    if "in_proj_qkv" in name or "conv1d" in name:
        return {sharing} - {1}
    dense = ".mlp." in name and ".shared_expert" not in name and last in ("gate_proj", "up_proj", "down_proj")
    return {1} if dense else {world}


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "qwen3_5"])
def test_dummy_weights_are_slices_of_the_whole_models(checkpoint: Checkpoint, family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint(family, "heads") / "config.json").read_text())

    def load(rank: int, world: int, layout: str) -> dict[str, torch.Tensor]:
        made = load_model(
            tmp_path,
            Parallel(rank, world),
            dtype=torch.float32,
            device="cpu",
            load_format="dummy",
            progress=False,
            attention_layout=layout,  # type: ignore[arg-type]
        )
        return {name: tensor.detach() for name, tensor in made.model.named_parameters()}

    whole, parts = load(0, 1, "replicated"), [load(rank, 2, "tensor") for rank in range(2)]
    outs = [name for name in whole if name.endswith(("mixer.out.weight.weight", "mlp.down.weight.weight"))]
    assert outs
    for name in outs:
        assert torch.equal(torch.cat([part[name] for part in parts], 1), whole[name]), name
    q = whole["layers.3.mixer.qkv.weight.weight" if family != "llama" else "layers.0.mixer.qkv.weight.weight"]
    mine = parts[1]["layers.3.mixer.qkv.weight.weight" if family != "llama" else "layers.0.mixer.qkv.weight.weight"]
    assert torch.equal(mine[:32], q[32:64])
    assert torch.equal(mine[32:48], q[80:96])
    assert torch.equal(mine[48:64], q[112:128])


def test_a_bias_behind_a_sum_is_added_once(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama", "heads")
    loaded = [
        load_model(path, Parallel(rank, 2), dtype=torch.float32, device="cpu", progress=False, attention_layout="tensor")
        for rank in range(2)
    ]
    first, second = (one.model.get_parameter("layers.0.mixer.out.bias") for one in loaded)
    assert torch.equal(first, read_tensors(path)["model.layers.0.self_attn.o_proj.bias"])
    assert not second.any()


def test_caches_states_and_weights_shrink_by_what_is_divided(checkpoint: Checkpoint) -> None:
    path = checkpoint("qwen3_5", "heads")
    whole = resolve(read_config(path))
    assert isinstance(whole, ModelConfig)
    sizes = []
    for ranks in (1, 2, 4):
        spec = spec_of(share.split(whole, ranks))
        sizes.append((bytes_per_block(spec, 16, "float32"), bytes_per_slot(spec, "float32")))
    # One attention layer of 2 key/value heads of 16; three of 4 value heads of 64 x 64, their channels 2 x 2 x 64 and 4 x 64, and
    # three positions of these.
    assert sizes[0] == (2 * 16 * 2 * 16 * 4, 3 * 4 * (4 * 64 * 64 + 3 * (256 + 256)))
    assert sizes[1] == (sizes[0][0] // 2, sizes[0][1] // 2)
    assert sizes[2] == (sizes[0][0] // 2, 3 * 4 * (64 * 64 + 3 * (128 + 64)))
    replicated, divided = (
        prepare_model(path, Parallel(1, 2), dtype=torch.float32, device="cpu", attention_layout=layout).weight_bytes
        for layout in ("replicated", "tensor")
    )
    hidden, units = 40, 56
    attention = hidden * 16 * (3 * 4 + 2 * 2)
    delta = hidden * (256 + 2 * 256 + 2 * 4) + 256 * hidden + 4 * (256 + 256) + 2 * 4
    assert replicated - divided == 4 * (attention + 3 * delta + 4 * 3 * hidden * units) // 2


@pytest.mark.parametrize(
    ("family", "variant", "ranks", "faults"),
    [
        ("mixtral", "plain", 4, "num_attention_heads is 6"),
        ("mixtral", "plain", 3, "num_key_value_heads is 2"),
        ("qwen3_next", "mixed", 3, "linear_num_key_heads is 2; intermediate_size is 56"),
        ("qwen3_5", "plain", 2, "num_attention_heads is 3; linear_num_value_heads is 3; linear_num_key_heads is 3"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(
    checkpoint: Checkpoint, family: str, variant: str, ranks: int, faults: str
) -> None:
    path = checkpoint(family, variant)
    with pytest.raises(UnsupportedModel) as refused:
        prepare_model(path, Parallel(0, ranks), dtype=torch.float32, device="cpu", attention_layout="tensor")
    assert str(refused.value) == f"attention_layout 'tensor' on {ranks} ranks: {faults}"


def test_one_rank_has_all_of_it(checkpoint: Checkpoint) -> None:
    whole, _ = placed(checkpoint("qwen3_next", "heads"), 1)
    assert share.share(share.split(whole, 1)) == whole


@pytest.mark.parametrize("layout", ["tensor", "data"])
def test_a_model_that_is_not_divided_is_refused_by_name(layout: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(next(iter(PRESETS.values())))))
    with pytest.raises(UnsupportedModel, match=f"attention_layout '{layout}' is not served for .*; 'replicated' is"):
        prepare_model(
            tmp_path,
            Parallel(0, 2),
            dtype=torch.float32,
            device="cpu",
            load_format="dummy",
            attention_layout=layout,  # type: ignore[arg-type]
        )
