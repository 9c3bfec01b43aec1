"""What is read of vision towers and their processors, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from model.errors import UnsupportedModel
from model.families.registry import resolve, spec_of
from model.folder import open_folder
from model.vision.config import PixelScale, VisionConfig
from tests.support.checkpoints import make_checkpoint, read_config

VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 2048,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
VL_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "rope_theta": 5000000,
    "vocab_size": 151936,
}
VL_MOE: dict[str, Any] = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "image_token_id": 151655,
    "video_token_id": 151656,
    "text_config": VL_TEXT,
    "tie_word_embeddings": False,
    "vision_config": VISION,
}
"""As Qwen3-VL-30B-A3B has it."""
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "video_token_id": 248057,
    "tie_word_embeddings": False,
    "text_config": {
        "head_dim": 256,
        "hidden_size": 2048,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
    "vision_config": {**VISION, "deepstack_visual_indexes": []},
}
"""As Qwen3.5-35B-A3B has it."""


def vision(config: dict[str, Any], **processors: dict[str, Any]) -> VisionConfig:
    parts = {"preprocessor": "image_processor", "video_preprocessor": "video_processor"}
    given = {parts[name]: (f"{name}_config.json", settings) for name, settings in processors.items()}
    found = resolve(config, None, given).vision
    assert found is not None
    return found


def test_published_configurations() -> None:
    config = resolve(VL_MOE)
    assert (config.family, config.rope.sections, config.rope.theta, config.rope.rotary_dim) == (
        "qwen3_vl_moe",
        (24, 20, 20),
        5e6,
        128,
    )
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.normalise, config.eos_token_ids) == (128, True, (151645,))
    spec = spec_of(config)
    assert spec.inputs == ("text", "image", "video")
    assert spec.vision is not None
    assert (spec.vision.placeholders, spec.vision.row_width, spec.vision.deepstack) == ((151655, 151656), 4 * 2048, 3)
    assert (spec.vision.patch, spec.vision.merge, spec.vision.frames) == (16, 2, 2)
    tower = vision(VL_MOE)
    assert (tower.depth, tower.head_dim, tower.side, tower.patch_width, tower.merged) == (27, 72, 48, 1536, 4608)
    hybrid = resolve(HYBRID)
    assert (hybrid.rope.sections, hybrid.rope.rotary_dim) == ((11, 11, 10), 64)
    shape = spec_of(hybrid).vision
    assert shape is not None
    assert (shape.placeholders, shape.row_width, shape.deepstack) == ((248056, 248057), 2048, 0)


def test_sections_where_none_are_named() -> None:
    """The families' own; text alone has them too, which changes nothing there."""
    plain = {key: value for key, value in VL_TEXT.items() if key != "rope_scaling"}
    assert resolve(VL_MOE | {"text_config": plain}).rope.sections == (24, 20, 20)
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    assert resolve(HYBRID | {"text_config": HYBRID["text_config"] | {"rope_parameters": rope}}).rope.sections == (11, 11, 10)


def test_text_alone(tmp_path: Path) -> None:
    for config in (VL_MOE, HYBRID):
        text = {key: value for key, value in config.items() if key != "vision_config"}
        assert resolve(text).vision is None
        assert (spec_of(resolve(text)).vision, spec_of(resolve(text)).inputs) == (None, ("text",))
    assert resolve(read_config(make_checkpoint("qwen3_5", "plain", tmp_path / "text"))).vision is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_act": "quick_gelu"}, "vision_config.hidden_act = 'quick_gelu'.*gelu_pytorch_tanh"),
        ({"num_heads": 7}, "vision_config.num_heads = 7"),
        ({"num_heads": 64}, "vision_config.num_heads = 64"),
        ({"in_channels": 1}, "vision_config.in_channels = 1"),
        ({"out_hidden_size": 3584}, "vision_config.out_hidden_size = 3584.*2048"),
        ({"num_position_embeddings": 2300}, "num_position_embeddings = 2300 .*square"),
        ({"depth": 0}, "depth = 0"),
        ({"patch_size": [16, 16]}, "patch_size"),
        ({"deepstack_visual_indexes": [8, 27]}, "deepstack_visual_indexes"),
        ({"deepstack_visual_indexes": [16, 8]}, "deepstack_visual_indexes"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_type = 'default'.*axial"),
    ],
)
def test_towers_that_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        resolve(VL_MOE | {"vision_config": VISION | change})


def test_other_refusals() -> None:
    with pytest.raises(UnsupportedModel, match=r"vision_config\.deepstack_visual_indexes = \[8, 16, 24\]"):
        resolve(HYBRID | {"vision_config": VISION})
    with pytest.raises(UnsupportedModel, match=r"image_token_id = 151936.*below vocab_size = 151936"):
        resolve(VL_MOE | {"image_token_id": 151936})
    with pytest.raises(UnsupportedModel, match="no video_token_id"):
        resolve({key: value for key, value in VL_MOE.items() if key != "video_token_id"})
    with pytest.raises(UnsupportedModel, match="vision_config = 'big'"):
        resolve(VL_MOE | {"vision_config": "big"})
    with pytest.raises(UnsupportedModel, match="no num_experts"):
        resolve(VL_MOE | {"text_config": {key: value for key, value in VL_TEXT.items() if key != "num_experts"}})


def test_scale_of_pixels() -> None:
    assert vision(VL_MOE).scale == PixelScale(rescale=1 / 255, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    given = {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3], "rescale_factor": 0.01, "patch_size": 16}
    expected = PixelScale(rescale=0.01, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0))
    assert vision(VL_MOE, preprocessor=given, video_preprocessor=given).scale == expected
    plain = vision(VL_MOE, preprocessor=given | {"do_rescale": False, "do_normalize": False}).scale
    assert plain == PixelScale(rescale=1.0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"image_mean": [0.5, 0.5]}, "preprocessor_config.json: image_mean"),
        ({"image_std": [0.5, 0.0, 0.5]}, "preprocessor_config.json: image_std"),
        ({"rescale_factor": "1/255"}, "rescale_factor = '1/255'"),
        ({"patch_size": 14}, "preprocessor_config.json: patch_size = 14, but the vision tower has 16"),
        ({"merge_size": 1}, "merge_size = 1"),
        ({"temporal_patch_size": 1}, "temporal_patch_size = 1"),
    ],
)
def test_processors_that_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        vision(VL_MOE, preprocessor=settings)


def test_processors_that_differ() -> None:
    with pytest.raises(UnsupportedModel, match=r"video_preprocessor_config\.json: scales pixels"):
        vision(VL_MOE, preprocessor={"image_mean": [0.5] * 3}, video_preprocessor={"image_mean": [0.4, 0.5, 0.5]})


def test_a_scale_that_is_not_named_is_that_of_transformers(tmp_path: Path) -> None:
    transformers.Qwen2VLImageProcessorPil(patch_size=16).save_pretrained(tmp_path)
    named = json.loads((tmp_path / "preprocessor_config.json").read_text())
    scale = vision(VL_MOE, preprocessor={"patch_size": 16}).scale
    assert (list(scale.mean), list(scale.std)) == (named["image_mean"], named["image_std"])
    assert vision(VL_MOE, video_preprocessor={}).scale == PixelScale()


def test_settings_come_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VL_MOE))
    assert open_folder(tmp_path).processors == {}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_std": [0.2, 0.3, 0.4]}))
    folder = open_folder(tmp_path)
    config = resolve(folder.config, folder.generation, folder.processors).vision
    assert config is not None
    assert config.scale.std == (0.2, 0.3, 0.4)
    both = {"image_processor": {"image_std": [0.5, 0.6, 0.7]}, "video_processor": {"image_mean": [0.1] * 3}, "tokenizer": "a name"}
    (tmp_path / "processor_config.json").write_text(json.dumps(both))
    assert open_folder(tmp_path).processors == {
        "image_processor": ("processor_config.json", both["image_processor"]),
        "video_processor": ("processor_config.json", both["video_processor"]),
    }
