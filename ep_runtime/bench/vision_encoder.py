"""Encoder throughput: our tower and transformers' with the same weights, on the same device, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ep_runtime.bench.vision_peer import PeerTower, attentions, fastest_peer
from model.layers.build import Build
from model.vision.config import VisionConfig
from model.vision.patches import ImagePixels, patch_count
from model.vision.tower import VisionTower

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest norm of the difference between the rows of both, over the norm of transformers' rows."""

PEAK_SIDE = {"cuda": 8192, "cpu": 768}
MIXED = "mixed"
COLUMNS = {
    "images": "images",
    "size": "size",
    "rows": "rows",
    "ours_ms": "ours ms",
    "spread_ms": "min..max",
    "images_per_s": "images/s",
    "rows_per_s": "rows/s",
    "tflops": "TFLOP/s",
    "peak_share": "of peak",
    "peer_ms": "transformers",
    "peer_spread_ms": "min..max",
    "peer_embed_ms": "its embedding",
    "ratio": "ratio",
    "difference": "difference",
}
Size = tuple[int, int]
"""Width and height of an image in pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Towers:
    """Both towers on one device, and what a large product reaches there in floating point operations a second."""

    ours: VisionTower
    peer: PeerTower
    dtype: torch.dtype
    device: torch.device
    peak: float


def open_towers(config: VisionConfig, vision_config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Towers:
    """Ours with random weights, and transformers' with a copy of them and the fastest of its attentions that run here."""
    tower = VisionTower(config, Build(dtype, device, row_major=device.type != "cpu"))
    randomise(tower)
    sample = [make_image((side, side), config, device, seed=0) for side in (16 * config.patch * config.merge,) * 2]
    with torch.inference_mode():
        peer = fastest_peer(
            lambda name: PeerTower(vision_config, tower, name, dtype),
            attentions(device),
            lambda peer: min(_peer_times(peer, sample, device)),
        )
        return Towers(ours=tower, peer=peer, dtype=dtype, device=device, peak=matrix_peak(device, dtype))


@torch.inference_mode()
def measure(towers: Towers, sizes: Sequence[Size], repeats: int) -> dict[str, Any]:
    """One row: these images at once, `repeats` times each in turn. RuntimeError when the two give different rows."""
    config, device = towers.ours.config, towers.device
    images = [make_image(size, config, device, seed) for seed, size in enumerate(sizes)]
    inputs = towers.peer.inputs(images)
    difference = compare(towers, images)
    calls = {"ours": lambda: encode(towers.ours, images), "peer": lambda: towers.peer.rows(inputs)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 1):
        for name in sorted(calls, reverse=number % 2 == 1):
            times[name].append(milliseconds(calls[name], device))
    ours, peer = times["ours"][1:], times["peer"][1:]
    embed = [milliseconds(lambda: towers.peer.embed(inputs), device) for _ in range(3)]
    median, rows = statistics.median(ours), sum(image.height * image.width for image in images)
    rate = tower_cost(towers.ours, images) / median * 1e3
    return {
        "images": len(images),
        "size": _size_name(sizes),
        "rows": rows,
        "patches": sum(patch_count(image, config) for image in images),
        "ours_ms": median,
        "spread_ms": f"{min(ours):.2f}..{max(ours):.2f}",
        "images_per_s": len(images) / median * 1e3,
        "rows_per_s": rows / median * 1e3,
        "tflops": rate / 1e12,
        "peak_share": rate / towers.peak,
        "peer_ms": statistics.median(peer),
        "peer_spread_ms": f"{min(peer):.2f}..{max(peer):.2f}",
        "peer_embed_ms": min(embed),
        "ratio": statistics.median(peer) / median,
        "difference": difference,
        "ours_all_ms": [round(value, 4) for value in ours],
        "peer_all_ms": [round(value, 4) for value in peer],
    }


@torch.inference_mode()
def compare(towers: Towers, images: Sequence[ImagePixels]) -> float:
    """The relative difference between the rows of both. RuntimeError when it is above the tolerance of the dtype."""
    ours = torch.cat(encode(towers.ours, images))
    difference = relative(ours, towers.peer.rows(towers.peer.inputs(images)))
    most = TOLERANCE[towers.dtype]
    if not difference <= most:
        raise RuntimeError(f"the rows of both towers differ by {difference:.2g} of their norm in {towers.dtype}; {most:g} is due")
    return difference


@torch.inference_mode()
def errors(towers: Towers, vision_config: dict[str, Any], sizes: Sequence[Size]) -> dict[str, float]:
    """How far each is from transformers' tower in float32 with the same weights, relative to the norm of the rows."""
    images = [make_image(size, towers.ours.config, towers.device, seed) for seed, size in enumerate(sizes)]
    exact = PeerTower(vision_config, towers.ours, "sdpa", torch.float32)
    inputs = exact.inputs(images)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        right = exact.rows(inputs)
    return {
        "ours": relative(torch.cat(encode(towers.ours, images)), right),
        "transformers": relative(towers.peer.rows(inputs), right),
    }


def relative(values: torch.Tensor, right: torch.Tensor) -> float:
    """Norm of the difference over the norm of `right`."""
    return float((values.float() - right.float()).norm() / right.float().norm())


def encode(tower: VisionTower, images: Sequence[ImagePixels]) -> list[torch.Tensor]:
    """All blocks at once, from uint8 pixels on the device to rows."""
    encoding = tower.begin(images)
    tower.advance(encoding, encoding.depth)
    return tower.rows(encoding)


def tower_cost(tower: VisionTower, images: Sequence[ImagePixels]) -> float:
    """Floating point operations of the products of an encoding: patch embedding, blocks, merger."""
    config, patches = tower.config, sum(patch_count(image, tower.config) for image in images)
    embedding = 2.0 * patches * config.patch_width * config.hidden
    merger = 2.0 * patches / config.merge**2 * config.merged * (config.merged + config.out_hidden)
    return embedding + config.depth * tower.layer_cost(images) + merger


def make_image(size: Size, config: VisionConfig, device: torch.device, seed: int) -> ImagePixels:
    """A random image. ValueError for sides that are not whole rows of a prompt."""
    unit, (width, height) = config.patch * config.merge, size
    if width % unit or height % unit:
        raise ValueError(f"an image of {width}x{height} pixels: both sides are to be multiples of {unit}")
    pixels = torch.randint(0, 256, (1, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return ImagePixels(frames=1, height=height // unit, width=width // unit, pixels=pixels.to(device))


def randomise(tower: VisionTower, seed: int = 0) -> None:
    """Weights that keep activations near one, so that a difference in any layer shows in the rows."""
    generator = torch.Generator(tower.positions.device).manual_seed(seed)
    for name, weight in tower.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, device=weight.device)
        if "norm" in name and name.endswith("weight"):
            weight.copy_(1 + 0.1 * noise)
        elif weight.dim() == 1:
            weight.copy_(0.1 * noise)
        else:
            weight.copy_(noise * (weight.numel() // weight.shape[0]) ** -0.5)


def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large square product in `dtype`, the median of several."""
    side = PEAK_SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    times = [milliseconds(lambda: left @ right, device) for _ in range(10)]
    return 2.0 * side**3 / (statistics.median(times[3:]) / 1e3)


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call: between events on a GPU's stream, where nothing else is under way, or on the clock."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _peer_times(peer: PeerTower, images: Sequence[ImagePixels], device: torch.device) -> list[float]:
    inputs = peer.inputs(images)
    return [milliseconds(lambda: peer.rows(inputs), device) for _ in range(5)]


def _size_name(sizes: Sequence[Size]) -> str:
    return "x".join(map(str, sizes[0])) if len(set(sizes)) == 1 else MIXED
