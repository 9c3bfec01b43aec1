"""`vision`: encoder throughput next to transformers', what images do to other streams, and what the encoder's cache saves."""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from ep_runtime.bench import report, vision_cache, vision_encoder, vision_streams
from ep_runtime.bench.configs import TINY, VISION_CONFIGS, write_vision_config
from ep_runtime.bench.session import Session, add_run_arguments, numbers, open_session
from ep_runtime.bench.vision_encoder import Size
from ep_runtime.bench.vision_peer import PeerAbsent
from ep_runtime.bench.vision_traffic import LEAD, TAIL, Maker
from ep_runtime.engine.main import pick_device
from ep_runtime.engine.rank import choose_dtype
from ep_runtime.supervise.place import read_place
from model.folder import open_folder
from model.loader import prepare_model
from model.parallel import Parallel

PARTS = ("encoder", "streams", "cache")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    parser.add_argument(
        "--model", choices=sorted(VISION_CONFIGS), default="qwen3.5-35b-a3b", help=f"with dummy weights; {TINY} is for a CPU"
    )
    parser.add_argument("--layers", type=int, help="shorten the text model to this many layers")
    parser.add_argument("--parts", type=parts, default=list(PARTS), metavar="PART,PART", help=f"of {', '.join(PARTS)}; all")
    add_run_arguments(parser)
    parser.add_argument("--batch", type=numbers, default=[1, 8], metavar="N,N", help="images that are encoded at once")
    parser.add_argument(
        "--sizes", type=sizes, default=sizes("512x512,1024x1024,2048x1024"), metavar="WxH,WxH", help="of the encoder's images"
    )
    parser.add_argument("--repeat", type=int, default=10, help="times that each is measured, in turn")
    parser.add_argument(
        "--load-sizes", type=sizes, default=sizes("1024x1024,2048x2048"), metavar="WxH,WxH", help="of the images beside streams"
    )
    parser.add_argument("--streams", type=int, default=8, help="sequences that decode")
    parser.add_argument("--stream-tokens", type=int, default=4096, help="most that a stream gets")
    parser.add_argument("--steps", type=int, default=256, help="of the streams alone")
    parser.add_argument("--rounds", type=int, default=8, help="single requests of each kind beside the streams")
    parser.add_argument("--between", type=int, default=8, help="steps between rounds")
    parser.add_argument("--burst", type=int, default=8, help="requests that come at once; 1: none do")
    parser.add_argument("--burst-rounds", type=int, default=4)


def run(options: argparse.Namespace) -> None:
    """Measure, print the tables and write the JSON."""
    if "encoder" in options.parts and read_place(os.environ).world > 1:
        raise SystemExit("the encoder is measured on one rank; under torchrun, give --parts streams,cache")
    with tempfile.TemporaryDirectory(prefix="bench-vision-") as temporary:
        folder = Path(temporary) / options.model
        folder.mkdir()
        write_vision_config(options.model, folder, options.layers)
        result: dict[str, Any] = {"benchmark": "vision", **report.environment(), "model": options.model}
        if "encoder" in options.parts:
            result["encoder"] = encoder_part(options, folder)
        if len({"streams", "cache"} & set(options.parts)):
            result |= served_parts(options, folder)
    report.write(options.out, result)


def encoder_part(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both towers alone, before the model is loaded; their memory is given back."""
    device = pick_device(options.device, 0)
    if device.type == "cpu" and options.threads is not None:
        torch.set_num_threads(options.threads)
    dtype = choose_dtype(options.dtype, open_folder(folder).config)
    config = prepare_model(folder, Parallel(0, 1), dtype=dtype, device=device, load_format="dummy").config.vision
    vision_config = VISION_CONFIGS[options.model]["vision_config"]
    if config is None:
        raise ValueError(f"{options.model} has no vision part")
    try:
        towers = vision_encoder.open_towers(config, vision_config, dtype, device)
    except PeerAbsent as error:
        raise SystemExit(str(error)) from error
    errors = vision_encoder.errors(towers, vision_config, options.sizes)
    rows = [vision_encoder.measure(towers, cell, options.repeat) for cell in cells(options.sizes, options.batch)]
    found = {
        "dtype": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "peer_attention": towers.peer.attention,
        "peak_tflops": towers.peak / 1e12,
        "tolerance": vision_encoder.TOLERANCE[dtype],
        "error_to_float32": errors,
        "rows": rows,
    }
    del towers
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    print(f"encoder of {options.model}, {found['dtype']}, {found['device']}; transformers with {found['peer_attention']} attention")
    print(report.table(rows, vision_encoder.COLUMNS))
    print(
        f"ratio: transformers' time over ours; peak: {found['peak_tflops']:.4g} TFLOP/s of a large product; rows may differ by "
        f"{found['tolerance']:g}; to float32 ours differ by {errors['ours']:.2g}, transformers' by {errors['transformers']:.2g}"
    )
    return found


def served_parts(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What needs the whole model: streams and the cache."""
    source = {"model": str(folder), "config_name": None, "load_format": "dummy"}
    given = argparse.Namespace(**vars(options) | source | {"max_num_batched_tokens": step_tokens(options)})
    with open_session(given, sequences=options.streams + options.burst, length=longest(options)) as session:
        spec = session.llm.spec.vision
        if spec is None:
            raise ValueError(f"{options.model} takes no images")
        maker = Maker(spec, session.llm.vocab_size)
        found: dict[str, Any] = session.describe() | {"max_num_batched_tokens": session.llm.config.max_num_batched_tokens}
        if "streams" in options.parts:
            found["streams"] = streams_part(options, session, maker)
        if "cache" in options.parts:
            found["cache"] = [vision_cache.measure(session, maker, size, options.repeat) for size in options.load_sizes]
            print("\ntime to the first token, nothing beside it")
            print(report.table(found["cache"], vision_cache.COLUMNS))
        return found | {"memory_bytes": session.llm.memory_bytes()}


def streams_part(options: argparse.Namespace, session: Session, maker: Maker) -> list[dict[str, Any]]:
    """Streams with and without images beside them."""
    load = vision_streams.Load(
        streams=options.streams,
        steps=options.steps,
        rounds=options.rounds,
        between=options.between,
        burst=options.burst,
        burst_rounds=options.burst_rounds,
    )
    rows = vision_streams.measure(session, maker, options.load_sizes, load, options.stream_tokens)
    step = session.llm.config.max_num_batched_tokens
    print(f"\n{options.streams} streams, {session.describe()['device']}; a step takes {step} rows")
    print(report.table(rows, vision_streams.COLUMNS))
    print(
        "milliseconds; gap/text's: longest gap of a round, median, over that with texts of as many tokens; gap/chunk's: over that"
    )
    print("with one text that fills a step; cost: by how much the gaps of its round are longer in all than those of streams alone")
    return rows


def step_tokens(options: argparse.Namespace) -> int:
    """Rows of a step, the server's default where none are given."""
    given: int | None = options.max_num_batched_tokens
    return given or (8192 if pick_device(options.device, 0).type == "cuda" else 512)


def longest(options: argparse.Namespace) -> int:
    """Positions that a sequence may need: a stream's, those of an image's prompt, or a prompt that fills a step."""
    tower = VISION_CONFIGS[options.model]["vision_config"]
    unit = tower["patch_size"] * tower["spatial_merge_size"]
    rows = max(width // unit * (height // unit) for width, height in options.load_sizes)
    return max(vision_streams.STREAM_PROMPT + options.stream_tokens, LEAD + rows + TAIL, step_tokens(options)) + 2


def cells(sizes: list[Size], batches: list[int]) -> list[list[Size]]:
    """The images of each row: as many of each size, then a mix of all sizes."""
    same = [[size] * batch for size in sizes for batch in batches]
    mixed = [[sizes[number % len(sizes)] for number in range(batch)] for batch in batches if batch > 1 and len(sizes) > 1]
    return same + mixed


def parts(text: str) -> list[str]:
    """An argument such as "encoder,cache"."""
    found = text.split(",")
    if not set(found) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r} has others than {', '.join(PARTS)}")
    return found


def sizes(text: str) -> list[Size]:
    """An argument such as "512x512,2048x1024": widths and heights in pixels."""
    found = []
    for part in text.split(","):
        width, _, height = part.partition("x")
        if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
            raise argparse.ArgumentTypeError(f"{part!r} is no size in pixels such as 1024x768")
        found.append((int(width), int(height)))
    return found
