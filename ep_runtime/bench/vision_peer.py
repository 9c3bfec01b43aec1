"""The peer of the vision benchmark: transformers' tower with our tower's weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from model.vision.patches import ImagePixels, patch_values
from model.vision.tower import VisionTower

RENAMED = {
    "patch_weight": "patch_embed.proj.weight",
    "patch_bias": "patch_embed.proj.bias",
    "positions": "pos_embed.weight",
}
PARTS = {"qkv": "attn.qkv", "out": "attn.proj", "up": "mlp.linear_fc1", "down": "mlp.linear_fc2"}
MERGER_PARTS = {"up": "linear_fc1", "down": "linear_fc2"}


class PeerAbsent(Exception):
    """transformers is not installed."""


class PeerTower:
    """transformers' Qwen3.5 tower. It starts from the values of patches, on the device: making them of pixels is not its part."""

    def __init__(self, vision_config: dict[str, Any], tower: VisionTower, attention: str, dtype: torch.dtype) -> None:
        try:
            from transformers import Qwen3_5MoeVisionConfig, Qwen3_5MoeVisionModel
        except ImportError as error:
            raise PeerAbsent(f"the vision benchmark compares with transformers 5, which is not installed: {error}") from error
        self.attention = attention
        self._config = tower.config
        with torch.device(tower.positions.device):
            made: Any = Qwen3_5MoeVisionModel._from_config(
                Qwen3_5MoeVisionConfig(**vision_config), attn_implementation=attention, dtype=dtype
            )
        made.load_state_dict({peer_name(name): value for name, value in tower.state_dict().items()}, strict=True)
        self.model = made.eval()

    def inputs(self, images: Sequence[ImagePixels]) -> tuple[torch.Tensor, torch.Tensor]:
        """What its processor makes: float32 values `[patches, patch_width]` and grids `[images, 3]` in patches, on the device."""
        merge = self._config.merge
        values = torch.cat([patch_values(image.pixels[None], self._config) for image in images])
        grids = [[1, merge * image.height, merge * image.width] for image in images]
        return values, torch.tensor(grids, device=values.device)

    def rows(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """`[rows, out_hidden]` of all images."""
        out: torch.Tensor = self.model(inputs[0], grid_thw=inputs[1]).pooler_output
        return out

    def embed(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Its patch embedding alone, a convolution, whose share of the time is told apart."""
        out: torch.Tensor = self.model.patch_embed(inputs[0])
        return out


def attentions(device: torch.device) -> list[str]:
    """Its implementations of attention that can run here, without fetching any."""
    flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    return ["sdpa", *(["flash_attention_2"] if flash else [])]


def fastest_peer(make: Callable[[str], PeerTower], names: Sequence[str], trial: Callable[[PeerTower], float]) -> PeerTower:
    """The one whose `trial`, milliseconds, is least."""
    peers = [make(name) for name in names]
    times = [trial(peer) if len(peers) > 1 else 0.0 for peer in peers]
    return peers[times.index(min(times))]


def peer_name(name: str) -> str:
    """transformers' name of a tensor of our tower."""
    name = name.replace(".weight.weight", ".weight")
    if name in RENAMED:
        return RENAMED[name]
    parts = MERGER_PARTS if name.startswith("merger.") else PARTS
    return ".".join(parts.get(part, part) for part in name.split("."))
