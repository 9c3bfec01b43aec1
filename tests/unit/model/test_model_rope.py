"""Rotary frequencies of every kind against transformers', from the same config.json."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextRotaryEmbedding

from model.config import RopeKind
from model.families.rope import read_rope
from model.layers.rotary import Rotary, inverse_frequencies

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "attention_factor": 1.7},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 512, "mscale": 0.7, "mscale_all_dim": 1.0},
]


@pytest.mark.parametrize("partial", [None, 0.5])
@pytest.mark.parametrize("theta", [10000.0, 5e6])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: "-".join(map(str, scaling.values())))
def test_scaled_frequencies(scaling: dict[str, Any], theta: float, partial: float | None) -> None:
    parameters = {**scaling, "rope_theta": theta} | ({"partial_rotary_factor": partial} if partial else {})
    reference = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=2048, rope_parameters=dict(parameters), head_dim=64
    )
    inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](reference, device="cpu")
    rope, _ = read_rope({"max_position_embeddings": 2048, "rope_parameters": parameters}, 64, theta=1.0)
    torch.testing.assert_close(inverse_frequencies(rope), inv_freq, rtol=1e-5, atol=0)
    assert rope.attention_factor == pytest.approx(factor)


def test_older_spelling() -> None:
    """`rope_theta` beside a `rope_scaling` whose kind is called `type`."""
    old = {
        "max_position_embeddings": 2048,
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    new = {
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    }
    assert read_rope(old, 64, theta=1.0) == read_rope(new, 64, theta=1.0)
    assert read_rope({"max_position_embeddings": 8}, 64, theta=7.0)[0].theta == 7.0


def test_positions_that_are_allowed() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read_rope({"max_position_embeddings": 40960, "rope_parameters": yarn}, 64, theta=1.0)[1] == 131072
    dynamic, positions = read_rope(
        {"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, 64, theta=1e4
    )
    assert (dynamic.kind, positions) == (RopeKind.DYNAMIC, 2048)


def test_three_part_positions() -> None:
    config = Qwen3_5MoeTextConfig(
        head_dim=64,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.5,
        },
    )
    positions = torch.randint(0, 500, (3, 9), generator=torch.Generator().manual_seed(0))
    cos, sin = Qwen3_5MoeTextRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
    rope, _ = read_rope(config.to_dict(), 64, theta=1.0)
    assert rope.sections == (6, 5, 5)
    got_cos, got_sin = Rotary(rope).tables(positions.int(), torch.float32)
    torch.testing.assert_close(got_cos[:, 0], cos[0], rtol=1e-4, atol=1e-5)
    # The sines of the first half carry the sign of the rotation.
    torch.testing.assert_close(got_sin[:, 0, 16:], sin[0, :, 16:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_sin[:, 0, :16], -sin[0, :, :16], rtol=1e-4, atol=1e-5)
