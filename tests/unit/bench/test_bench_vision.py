"""The vision benchmark: its parts from end to end on a tiny model, and its sums against transformers, torch and numbers by hand."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, Qwen3_5MoeVisionModel

from ep_runtime.bench import vision_cache, vision_encoder
from ep_runtime.bench.__main__ import main
from ep_runtime.bench.configs import TINY, VISION_CONFIGS, write_vision_config
from ep_runtime.bench.vision import cells, parts, sizes
from ep_runtime.bench.vision_encoder import Towers
from ep_runtime.bench.vision_peer import PeerAbsent, PeerTower
from ep_runtime.bench.vision_streams import Gathered, gaps_between, summary
from ep_runtime.bench.vision_traffic import LEAD, TAIL, Maker
from model.config import ModelConfig
from model.loader import PreparedModel, prepare_model
from model.parallel import Parallel

CPU = torch.device("cpu")
VISION = VISION_CONFIGS[TINY]["vision_config"]


def prepared(name: str, folder: Path) -> PreparedModel:
    write_vision_config(name, folder)
    return prepare_model(folder, Parallel(0, 1), dtype=torch.float32, device="cpu", load_format="dummy")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return prepared(TINY, tmp_path_factory.mktemp("tiny")).config


@pytest.fixture
def towers(tiny: ModelConfig) -> Towers:
    assert tiny.vision is not None
    return vision_encoder.open_towers(tiny.vision, VISION, torch.float32, CPU)


@pytest.mark.parametrize("name", VISION_CONFIGS)
def test_configurations_are_what_transformers_reads(name: str, tmp_path: Path) -> None:
    model = prepared(name, tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert model.spec.vision is not None
    assert model.spec.vision.placeholders == (theirs.image_token_id, theirs.video_token_id)
    with torch.device("meta"):
        peer = Qwen3_5MoeVisionModel._from_config(theirs.vision_config)
    ours = sum(weight.numel() for weight in model.module.get_submodule("tower").parameters())
    assert ours == sum(weight.numel() for weight in peer.parameters())
    if name != TINY:
        # The published sizes are the classes' own defaults, but for the width of the text model.
        plain = type(theirs.vision_config)(out_hidden_size=model.config.hidden_size).to_dict()
        assert {field: plain[field] for field in VISION} == {field: theirs.vision_config.to_dict()[field] for field in VISION} | {
            "model_type": plain["model_type"]
        }


@torch.inference_mode()
def test_both_towers_give_the_same_rows_and_a_wrong_weight_is_seen(towers: Towers) -> None:
    images = [vision_encoder.make_image(size, towers.ours.config, CPU, 0) for size in ((64, 96), (32, 32), (64, 96))]
    assert vision_encoder.compare(towers, images) < 1e-5
    assert vision_encoder.errors(towers, VISION, [(64, 32)])["transformers"] == 0
    towers.ours.get_submodule("blocks.2").down.bias[0] += 1  # type: ignore[union-attr, operator, index]
    with pytest.raises(RuntimeError, match=r"differ by .* 0\.0001 is due"):
        vision_encoder.measure(towers, [(64, 96)], 1)


@torch.inference_mode()
def test_cost_of_a_tower_is_what_torch_counts(towers: Towers) -> None:
    images = [vision_encoder.make_image(size, towers.ours.config, CPU, 0) for size in ((64, 96), (128, 64))]
    inputs = towers.peer.inputs(images)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        towers.peer.rows(inputs)
    assert vision_encoder.tower_cost(towers.ours, images) == counter.get_total_flops()


def test_images_are_whole_rows(towers: Towers) -> None:
    with pytest.raises(ValueError, match="multiples of 32"):
        vision_encoder.make_image((64, 40), towers.ours.config, CPU, 0)


def test_without_transformers_it_says_so(towers: Towers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PeerAbsent, match="compares with transformers 5, which is not installed"):
        PeerTower(VISION, towers.ours, "sdpa", torch.float32)


def test_prompts(tmp_path: Path) -> None:
    spec = prepared(TINY, tmp_path).spec.vision
    assert spec is not None
    maker = Maker(spec, vocab_size=502)
    first, text = maker.image((64, 96)), maker.text(500)
    again = maker.again(first)
    assert first.prompt[LEAD:-TAIL] == [500] * 6 == again.prompt[LEAD:-TAIL]
    assert (first.images[0].start, first.images[0].height, first.images[0].width) == (LEAD, 3, 2)
    assert (again.images, again.prompt == first.prompt) == (first.images, False)
    assert not {500, 501} & {*text.prompt, *first.prompt[:LEAD], *first.prompt[-TAIL:]}
    assert maker.image((64, 96)).images[0].digest != first.images[0].digest


def test_a_request_that_is_known_or_new_against_what_it_should_be(tmp_path: Path) -> None:
    spec = prepared(TINY, tmp_path).spec.vision
    assert spec is not None
    request = Maker(spec, vocab_size=512).image((32, 32))
    empty: Any = SimpleNamespace(llm=SimpleNamespace(encoded=set()))
    filled: Any = SimpleNamespace(llm=SimpleNamespace(encoded={request.images[0].digest}))
    vision_cache.check_known(empty, request, known=False)
    vision_cache.check_known(filled, request, known=True)
    with pytest.raises(RuntimeError, match="not among"):
        vision_cache.check_known(empty, request, known=True)
    with pytest.raises(RuntimeError, match="is among"):
        vision_cache.check_known(filled, request, known=False)


def test_gaps_of_a_round_and_what_they_say() -> None:
    stamps = [1.0, 1.25, 1.5, 2.5, 2.75]
    assert gaps_between(stamps, 1.3, 2.5) == [250.0, 1000.0]
    assert gaps_between(stamps, 1.0, 9.0) == [250.0, 250.0, 1000.0, 250.0]
    found = Gathered(tokens=7, gaps=[[250.0, 1000.0] * 2, [250.0, 500.0] * 2], first=[900.0, 400.0, 600.0, 500.0])
    row = summary("image", 2, found, streams=2, alone_ms=250.0)
    assert (row["rounds"], row["median_ms"], row["gap_ms"], row["longest_ms"], row["first_ms"]) == (2, 375.0, 750.0, 1000.0, 550.0)
    # Both rounds together take each stream 750 + 250 ms longer than undisturbed, and four requests came.
    assert row["cost_ms"] == 250.0


def test_arguments() -> None:
    assert sizes("64x32,32x32") == [(64, 32), (32, 32)]
    assert parts("cache,encoder") == ["cache", "encoder"]
    for parse, text in ((sizes, "64"), (sizes, "0x32"), (sizes, "64x-32"), (parts, "encoder,all")):
        with pytest.raises(Exception, match=r"no size|others than"):
            parse(text)
    assert cells([(1, 2), (3, 4)], [1, 3]) == [[(1, 2)], [(1, 2)] * 3, [(3, 4)], [(3, 4)] * 3, [(1, 2), (3, 4), (1, 2)]]


def test_all_parts_on_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "vision.json"
    flags = (
        "--model tiny --device cpu --threads 1 --batch 1,2 --sizes 64x64,96x64 --repeat 1 --load-sizes 96x64 --steps 8 --rounds 1"
    )
    more = "--streams 2 --stream-tokens 300 --between 2 --burst 2 --burst-rounds 1 --max-num-batched-tokens 48"
    main(["vision", *flags.split(), *more.split(), "--out", str(out)])
    result = json.loads(out.read_text())
    assert (result["model"], result["max_num_batched_tokens"], result["encoder"]["peer_attention"]) == (TINY, 48, "sdpa")
    rows = result["encoder"]["rows"]
    assert [(row["images"], row["size"], row["rows"]) for row in rows] == [
        (1, "64x64", 4),
        (2, "64x64", 8),
        (1, "96x64", 6),
        (2, "96x64", 12),
        (2, "mixed", 10),
    ]
    for row in rows:
        assert row["difference"] < 1e-4
        assert row["images_per_s"] * row["ours_ms"] == pytest.approx(1e3 * row["images"])
        assert row["ratio"] == pytest.approx(row["peer_ms"] / row["ours_ms"])
    tokens = LEAD + 6 + TAIL
    assert [(row["kind"], row.get("at_once"), row.get("tokens")) for row in result["streams"]] == [
        ("nothing", None, None),
        ("text", 1, tokens),
        ("image 96x64", 1, tokens),
        ("text, a full chunk", 1, 46),
        ("text", 2, tokens),
        ("image 96x64", 2, tokens),
    ]
    assert all(row["longest_ms"] >= row["p99_ms"] >= row["median_ms"] > 0 for row in result["streams"])
    (cache,) = result["cache"]
    assert (cache["tokens"], cache["saved_ms"]) == (tokens, pytest.approx(cache["new_ms"] - cache["known_ms"]))
    printed = capsys.readouterr().out
    assert all(title in printed for title in ("encoder of tiny", "2 streams", "encoder's share"))


def test_streams_that_end_too_early_are_no_measurement() -> None:
    few = (
        "--model tiny --device cpu --threads 1 --parts streams --load-sizes 32x32 --streams 1 --stream-tokens 6 --steps 2 --burst 1"
    )
    with pytest.raises(RuntimeError, match="give more --stream-tokens"):
        main(["vision", *few.split(), "--rounds", "1", "--between", "2", "--max-num-batched-tokens", "32"])
