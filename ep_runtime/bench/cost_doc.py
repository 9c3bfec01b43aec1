"""`cost`: the tables of docs/scaling.md, from the cost model and the recorded results; with --fit, its constants from these first.

A table stands in the page between `<!-- table NAME -->` and `<!-- end -->`; what is between them is made here.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ep_runtime.bench.cost import LAYOUTS, Case, Machine, ModelCosts, decode_step
from ep_runtime.bench.cost_check import check, check_loads, refit, refit_prompts, worst
from ep_runtime.bench.cost_models import (
    MACHINES,
    known_models,
    load_machine,
    read_loads,
    read_records,
    read_results,
    save_machine,
)
from ep_runtime.bench.cost_shares import MACHINE, check_shares, share_loads

SHARES = "h200-share"
"""The recorded result of `bench share`."""

RANKS = (1, 2, 4, 8)
BATCHES = (1, 32, 256)
HOSTS = (1, 2, 4, 8)
PER_HOST = 8
MEMORY_GIB = 143771 / 1024 * 0.9
"""What a rank may fill."""

_TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    parser.add_argument("--data", type=Path, default=Path("docs/benchmarks/data"), help="folder of recorded results")
    parser.add_argument("--fit", action="store_true", help="find the constants again, and keep them")
    parser.add_argument("--page", type=Path, help="page whose tables are replaced; default: they are printed")


def run(options: argparse.Namespace) -> None:
    """Make the tables; print them, or put them into the page."""
    results = read_results(sorted(options.data.glob("*.json")))
    models = known_models()
    machine = load_machine(MACHINE)
    if options.fit:
        machine = replace(machine, fitted=refit(machine, read_records(results, models)))
        machine = refit_prompts(machine, [*read_loads(results, models), *share_loads(models, results[SHARES])])
        save_machine(machine, MACHINES / f"{MACHINE}.json")
        machine = load_machine(MACHINE)
    made = tables(machine, models, results)
    if options.page is None:
        for name, text in made.items():
            print(f"{name}\n{text}")
    else:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(filled(page, made), encoding="utf-8")


def filled(page: str, made: Mapping[str, str]) -> str:
    """The page with its tables replaced. Raises ValueError when it has others than `made`, or one of these is not in it."""
    names = [match.group(2) for match in _TABLE.finditer(page)]
    if sorted(names) != sorted(made):
        raise ValueError(f"the page has the tables {sorted(names)}, made are {sorted(made)}")
    return _TABLE.sub(lambda match: match.group(1) + made[match.group(2)] + match.group(3), page)


def tables(machine: Machine, models: Mapping[str, ModelCosts], results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Every table by name, in Markdown."""
    return {
        "constants": constants_table(machine),
        "check": check_table(machine, models, results),
        "loads": loads_table(machine, models, results),
        "ranks": ranks_table(machine, models),
        "shares": shares_table(machine, models, results[SHARES]),
        "hosts": hosts_table(machine, models),
        "control": control_table(results["cpu-control"]),
    }


def constants_table(machine: Machine) -> str:
    """The machine's constants, and where each is from."""
    fitted, links = machine.fitted, machine.links
    lines = [
        ("memory, copy", f"{machine.bandwidth / 1e12:.2f} TB/s", "measured before each run; the run's own is used in checks"),
        ("an attention layer", f"{fitted.attention:.1f} µs", "fitted"),
        ("a Gated DeltaNet layer", f"{fitted.delta:.1f} µs", "fitted"),
        ("grouping, a routed layer, from 3 rows", f"{fitted.grouping:.1f} µs", "fitted"),
        ("a row in a layer", f"{fitted.row:.2f} µs", "fitted"),
        (
            "a collective of two ranks",
            f"{links.reduction:.1f} µs",
            "a sum of one row in a graph, 2.9 µs, less 1.5 of the norm in it",
        ),
        ("prompt rows", f"{machine.prefill_rate / 1e12:.0f} TFLOP/s", "fitted to the prefill rows, and to one rank's part of them"),
        ("a step with prompt rows", f"{machine.prefill_fixed * 1e3:.0f} ms", "likewise"),
        ("a prompt row in a Gated DeltaNet layer, all heads", f"{machine.prefill_delta * 1e9:.0f} ns", "likewise"),
        (
            "into a GPU from its host's others",
            f"{links.inside / 1e9:.0f} GB/s",
            "a sum of 8192 rows of 4 KiB through peer memory, 2 GPUs: 102.9 µs",
        ),
        ("a layer's launches in an eager step", f"{links.launch:.0f} µs", "15 ms of host time, 48 layers"),
        ("a collective, each rank beyond two", f"{links.peer:.1f} µs", "**assumed**"),
        ("into a GPU from other hosts", f"{links.between / 1e9:.0f} GB/s", "**assumed**: 400 Gb/s a GPU, at 90 %"),
        ("a collective that leaves the host", f"{links.network:.0f} µs", "**assumed**"),
    ]
    return _markdown(("constant", "", "from"), lines)


def check_table(machine: Machine, models: Mapping[str, ModelCosts], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Measured decode steps beside what the model says; a last line has the largest errors of steady rows."""
    rows = check(machine, read_records(results, models))
    lines = [
        (
            row["model"],
            row["layout"],
            str(row["ranks"]),
            str(row["batch"]),
            f"{row['measured_ms']:.2f}" + ("" if row["steady"] else f" (median {row['median_ms']:.1f})"),
            f"{row['predicted_ms']:.2f}",
            _percent(row["off"]),
            "-" if row["others_off"] is None else _percent(row["others_off"]),
            f"{100 * row['collectives']:.0f} %",
        )
        for row in rows
    ]
    header = ("model", "layout", "GPUs", "batch", "measured ms", "predicted", "off", "off, fitted without it", "collectives")
    own, others = (f"{worst(rows, key):.1%}" for key in ("off", "others_off"))
    ends = f"\nLargest error of a steady row: {own}; with constants fitted without its load: {others}.\n"
    return _markdown(header, lines) + ends


def loads_table(machine: Machine, models: Mapping[str, ModelCosts], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Recorded prefill and throughput results beside what the model says."""
    lines = []
    for row in check_loads(machine, read_loads(results, models)):
        cells = (row["what"], f"{row['measured_s']:.3g}", f"{row['predicted_s']:.3g}", _percent(row["off"]))
        lines.append((row["model"], row["layout"], str(row["ranks"]), *cells))
    return _markdown(("model", "layout", "GPUs", "load", "measured s", "predicted s", "off"), lines)


def shares_table(machine: Machine, models: Mapping[str, ModelCosts], result: Mapping[str, Any]) -> str:
    """Steps of one rank of several beside what the model says of them; a last line has the largest errors."""
    rows = check_shares(machine, models, result)
    steps = list(dict.fromkeys(row["what"] for row in rows))
    loads = list(dict.fromkeys((row["model"], row["layout"], row["ranks"]) for row in rows))
    cells = {
        (row["model"], row["layout"], row["ranks"], row["what"]): (
            f"{row['measured_ms']:.2f} / {row['predicted_ms']:.2f} ({_percent(row['off'])})"
        )
        for row in rows
    }
    lines = [(*map(str, load), *(cells.get((*load, step), "-") for step in steps)) for load in loads]
    worst_by = {kind: max(abs(row["off"]) for row in rows if row["what"].startswith(kind)) for kind in ("decode", "prompts")}
    ends = f"\nLargest error of a decode step: {worst_by['decode']:.1%}; of a step of prompts: {worst_by['prompts']:.1%}.\n"
    return _markdown(("model", "layout", "ranks", *steps), lines) + ends


def ranks_table(machine: Machine, models: Mapping[str, ModelCosts]) -> str:
    """Predicted decode steps of one host by layout and ranks: milliseconds, and efficiency beside the fewest ranks that hold it."""
    lines = []
    for model in models.values():
        worlds = [world for world in RANKS if weights_gib(model, world) <= MEMORY_GIB]
        for layout in LAYOUTS:
            for batch in BATCHES:
                cases = {world: Case(batch=batch, per_host=world, layout=layout, stay=True) for world in worlds}
                costs = {world: decode_step(machine, model, case) for world, case in cases.items()}
                first = worlds[0]
                cells = [
                    f"{costs[world].total:.2f} ({costs[first].total * first / (costs[world].total * world):.0%})"
                    if world in costs
                    else "does not fit"
                    for world in RANKS
                ]
                share = costs[max(worlds)].collectives / costs[max(worlds)].device
                lines.append((model.name, layout, str(batch), *cells, f"{share:.0%}"))
    return _markdown(("model", "layout", "batch", *(f"{world}" for world in RANKS), "collectives at 8"), lines)


def hosts_table(machine: Machine, models: Mapping[str, ModelCosts]) -> str:
    """Predicted decode steps over several hosts of eight: as it is, in graphs, and with sums by host."""
    lines = []
    for model in models.values():
        for batch in BATCHES[1:]:
            for hosts in HOSTS:
                case = Case(batch=batch, per_host=PER_HOST, hosts=hosts)
                today = decode_step(machine, model, replace(case, graph=hosts == 1))
                graph = decode_step(machine, model, case)
                by_host = decode_step(machine, model, replace(case, by_host=True))
                data = decode_step(machine, model, replace(case, layout="data", stay=hosts == 1))
                cells = [f"{cost.total:.2f}" for cost in (today, graph, by_host, data)]
                lines.append((model.name, str(batch), f"{hosts} × {PER_HOST}", *cells, f"{graph.collectives / graph.device:.0%}"))
    header = (
        "model",
        "batch",
        "hosts × GPUs",
        "as it is",
        "in graphs",
        "and sums by host",
        "data, in graphs",
        "collectives, in graphs",
    )
    return _markdown(header, lines)


def control_table(result: Mapping[str, Any]) -> str:
    """What `bench control` has recorded."""
    keys = ("encode_us", "send_us", "collect_us", "judge_us", "head_us")
    lines = [
        (
            str(row["ranks"]),
            str(row["rows"]),
            str(row["frame_bytes"]),
            *(f"{row[key]:.0f}" for key in keys),
            f"{row['worker_us']:.0f}",
        )
        for row in result["rows"]
    ]
    return _markdown(
        ("ranks", "sequences", "bytes of the frame", "encode", "send", "acks", "judge", "head, all", "a worker"), lines
    )


def weights_gib(model: ModelCosts, world: int) -> float:
    """Weights of a rank, embedding included."""
    row = model.config.hidden_size * model.element
    experts = -(-model.spec.num_experts // world) * len(model.spec.moe_layers) * model.expert
    head = model.config.vocab_size * row / world
    return (experts + model.dense + head + model.config.vocab_size * row) / 2**30


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
