"""A picture of a result: what `--plot FILE.png` and `python -m ep_runtime.bench plot RESULT.json FILE.png` draw."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep_runtime.bench.scale_rows import decode_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = Mapping[str, Any]
PANEL = (5.0, 4.0)
"""Width and height of one panel in inches."""


def plot_file(text: str) -> Path:
    """An argument of --plot; refused before anything is measured where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("plots need matplotlib, which is not installed (extra 'bench')")
    return Path(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `plot`."""
    parser.add_argument(
        "result", type=Path, help="JSON of decode, prefill, throughput, collectives, scale, or serve --save-detailed"
    )
    parser.add_argument("plot", type=plot_file, metavar="FILE.png")


def run(options: argparse.Namespace) -> None:
    """Draw a result that was written before."""
    save(options.plot, json.loads(options.result.read_text(encoding="utf-8")))


def save(path: Path | None, result: Result) -> None:
    """Draw `result` into `path`, if a file is wanted. Raises ValueError for a benchmark that has no picture."""
    if path is None:
        return
    from matplotlib.figure import Figure

    kind = result["benchmark"]
    if kind not in DRAWN:
        raise ValueError(f"there is no picture of {kind!r}; there is one of {', '.join(DRAWN)}")
    figure = Figure(layout="constrained")
    DRAWN[kind](figure, result)
    figure.savefig(path, dpi=120)


def draw_decode(figure: Figure, result: Result) -> None:
    """Milliseconds a step and tokens per second by batch, with the floor, and transformers where it was measured."""
    time, rate = _panels(figure, 2)
    rows = result["rows"]
    batches = [row["batch"] for row in rows]
    for key, name in (("step_ms", "median"), ("p90_ms", "p90"), ("floor_ms", "floor"), ("split_floor_ms", "floor, all split")):
        _curve(time, batches, [row[key] for row in rows], name)
    _curve(rate, batches, [row["tokens_per_s"] for row in rows], _about(result))
    _curve(rate, batches, [row["batch"] / row["floor_ms"] * 1e3 for row in rows], "floor")
    peers = [row for row in rows if row.get("peer_ms")]
    if peers:
        at = [row["batch"] for row in peers]
        _curve(time, at, [row["peer_ms"] for row in peers], "transformers")
        _curve(rate, at, [row["batch"] / row["peer_ms"] * 1e3 for row in peers], "transformers")
    _label(time, "decode step", "sequences", "ms")
    _label(rate, "decode", "sequences", "tokens/s")


def draw_prefill(figure: Figure, result: Result) -> None:
    """Tokens per second by number of prompts, with the floor, and transformers where it was measured."""
    (axes,) = _panels(figure, 1)
    rows = result["rows"]
    tokens = [row["prompts"] * row["prompt_len"] for row in rows]
    series = {_about(result): [row["tokens_per_s"] for row in rows]}
    series["floor"] = [count / row["floor_seconds"] for count, row in zip(tokens, rows, strict=True)]
    if any(row.get("peer_seconds") for row in rows):
        pairs = zip(tokens, rows, strict=True)
        series["transformers"] = [count / row["peer_seconds"] if row.get("peer_seconds") else 0.0 for count, row in pairs]
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        axes.bar([place + number * width for place in range(len(rows))], values, width, label=name)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(rows))])
    axes.set_xticklabels([f"{row['prompts']} x {row['prompt_len']}" for row in rows])
    _label(axes, "prefill", "prompts x tokens", "tokens/s")


def draw_throughput(figure: Figure, result: Result) -> None:
    """How many tokens there were at each moment, and how many sequences got one in a step."""
    total, running = _panels(figure, 2)
    row = result["rows"][0]
    times = [at for at, _ in row["arrivals"]]
    counts = [count for _, count in row["arrivals"]]
    total.plot(times, list(accumulate(counts)), label=f"{row['seconds']:.2f} s, floor {row['floor_seconds']:.2f} s")
    running.plot(times, counts, linewidth=0.8, label=_about(result))
    running.set_ylim(bottom=0)
    _label(total, f"{row['requests']} requests of {row['prompt_len']} in, {row['new_tokens']} out", "seconds", "new tokens")
    _label(running, "sequences that got a token in a step", "seconds", "sequences")


def draw_serve(figure: Figure, result: Result) -> None:
    """What share of the requests (for ITL, of the gaps) took at most so long."""
    if "ttfts" not in result:
        raise ValueError("a picture of serve needs what --save-detailed writes")
    done = [place for place, seconds in enumerate(result["e2els"]) if seconds]
    ttfts, e2els, tokens = ([result[name][place] for place in done] for name in ("ttfts", "e2els", "output_lens"))
    series = {
        "TTFT": ttfts,
        "TPOT": [(whole - first) / (n - 1) for whole, first, n in zip(e2els, ttfts, tokens, strict=True) if n > 1],
        "ITL": [gap for gaps in result["itls"] for gap in gaps],
        "E2EL": e2els,
    }
    for axes, (name, seconds) in zip(_panels(figure, len(series)), series.items(), strict=True):
        ordered = sorted(1e3 * value for value in seconds)
        axes.step(ordered, [(place + 1) / len(ordered) for place in range(len(ordered))], where="post", label=_rate(result))
        _label(axes, name, "ms", "share")


def draw_collectives(figure: Figure, result: Result) -> None:
    """Microseconds of each collective by rows, a curve for each variant: the median, and up to the 90th percentile."""
    names = list(dict.fromkeys(row["collective"] for row in result["rows"]))
    for axes, name in zip(_panels(figure, len(names)), names, strict=True):
        rows = [row for row in result["rows"] if row["collective"] == name]
        for variant in dict.fromkeys(row["variant"] for row in rows):
            own = [row for row in rows if row["variant"] == variant]
            counts, medians = [row["rows"] for row in own], [row["median_us"] for row in own]
            axes.fill_between(counts, medians, [row["p90_us"] for row in own], alpha=0.2)
            _curve(axes, counts, medians, variant)
        _label(axes, f"{name}, {result['ranks']} ranks", f"rows of {result['width']}", "us")


def draw_scale(figure: Figure, result: Result) -> None:
    """For each model and layout, by ranks: tokens per second of each batch, and what a rank gives beside one of the fewest."""
    rows = decode_rows(result["parts"])
    kinds = list(dict.fromkeys((row["model"], row["layout"]) for row in rows))
    panels = _panels(figure, 2 * len(kinds))
    for (model, layout), rate, share in zip(kinds, panels[::2], panels[1::2], strict=True):
        own = [row for row in rows if (row["model"], row["layout"]) == (model, layout)]
        for batch in dict.fromkeys(row["batch"] for row in own):
            line = [row for row in own if row["batch"] == batch]
            ranks = [row["ranks"] for row in line]
            _curve(rate, ranks, [row["tokens_per_s"] for row in line], f"batch {batch}")
            share.plot(ranks, [row["efficiency"] for row in line], marker="o", markersize=3, label=f"batch {batch}")
        _label(rate, f"{model}, {layout}", "ranks", "tokens/s")
        _label(share, f"{model}, {layout}", "ranks", "efficiency")


DRAWN: Mapping[str, Callable[[Figure, Result], None]] = {
    "decode": draw_decode,
    "prefill": draw_prefill,
    "throughput": draw_throughput,
    "serve": draw_serve,
    "collectives": draw_collectives,
    "scale": draw_scale,
}


def _panels(figure: Figure, count: int) -> list[Axes]:
    columns = 2 if count == 4 else min(count, 3)
    lines = -(-count // columns)
    figure.set_size_inches(PANEL[0] * columns, PANEL[1] * lines)
    return [figure.add_subplot(lines, columns, place + 1) for place in range(count)]


def _curve(axes: Axes, x: Sequence[float], y: Sequence[float], name: str) -> None:
    axes.plot(x, y, marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize="small")


def _about(result: Result) -> str:
    return f"{result['model']}, {result['ranks']} rank{'s' if result['ranks'] > 1 else ''}"


def _rate(result: Result) -> str:
    return f"{result['num_prompts']} requests, {result['request_rate']}/s"
