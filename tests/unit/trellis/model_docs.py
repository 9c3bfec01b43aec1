"""The generated parts of docs/api/model-interfaces.md: `python -m tests.unit.trellis.model_docs` writes them anew.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`; everything else in the file is written by hand.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import nn

from model import trellis
from model.trellis import ModelError, TrellisModel, build_preset_model
from model.trellis.audit import ROW_OF_KEY

PAGE = Path(__file__).parents[3] / "docs" / "api" / "model-interfaces.md"
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
METHODS = (
    "initial_state", "state_shape", "loop_capacity_schedule", "expected_loops", "effective_depth", "parameter_report",
    "strip_aux_heads", "stripped_keys", "load_serving_state_dict", "all_layers", "core_layers", "apply_readout",
)  # fmt: skip
RECORDS = (
    "TrellisOutput", "LoopReadout", "BankReadout", "ModelState", "StateShape", "RouterDecision", "ModelSettings", "RouterSettings",
    "AuxHeadSpec", "TrellisConfig", "ModelParameterReport",
)  # fmt: skip


def regenerate(page: str) -> str:
    """The page with every generated part as the code has it. Raises KeyError for a part that is none."""
    return PART.sub(lambda part: part[1] + GENERATORS[part[2]]() + part[3], page)


def exports() -> str:
    return table(("name", "kind", "role"), ((f"`{name}`", kind(name), role(getattr(trellis, name))) for name in trellis.__all__))


def kind(name: str) -> str:
    thing = getattr(trellis, name)
    if not inspect.isclass(thing):
        return "function" if callable(thing) else "constant"
    if issubclass(thing, Exception):
        return "exception"
    if issubclass(thing, nn.Module):
        return "module"
    return "dataclass" if dataclasses.is_dataclass(thing) else "object"


def role(thing: object) -> str:
    """The first sentence of the docstring; a constant has none."""
    if not inspect.isclass(thing) and not inspect.isfunction(thing):
        return ", ".join(f"`{each}`" for each in thing)
    text = " ".join((thing.__doc__ or "").split())
    return re.split(r"(?<=\.) |$", text, maxsplit=1)[0].rstrip(".").replace("|", r"\|")


def signature(owner: str, function: Callable) -> str:
    """One line a parameter, annotations as they stand in the source."""
    described = inspect.signature(function)
    lines = []
    for parameter in described.parameters.values():
        if parameter.name == "self":
            continue
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"    {parameter.name}: {parameter.annotation}{default},")
    inner = "\n" + "\n".join(lines) + "\n" if lines else ""
    return f"{owner}({inner}) -> {described.return_annotation}\n"


def calls() -> str:
    return (
        "```python\n" + "".join(signature(f"model.{name}", getattr(TrellisModel, name)) for name in ("forward", "step")) + "```\n"
    )


def methods() -> str:
    rows = []
    for name in METHODS:
        member = inspect.getattr_static(TrellisModel, name)
        function = member.fget if isinstance(member, property) else member
        parameters = [
            parameter.name + ("" if parameter.default is parameter.empty else f"={parameter.default!r}")
            for parameter in inspect.signature(function).parameters.values()
            if parameter.name != "self"
        ]
        call = name if isinstance(member, property) else f"{name}({', '.join(parameters)})"
        rows.append((f"`{call}`", f"`{inspect.signature(function).return_annotation}`".replace("|", r"\|"), role(function)))
    return table(("method", "returns", "what"), rows)


def records() -> str:
    text = ""
    for name in RECORDS:
        rows = []
        for field in dataclasses.fields(getattr(trellis, name)):
            default = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
            if field.default_factory is not dataclasses.MISSING:
                default = f"`{type(field.default_factory()).__name__}()`"
            rows.append((f"`{field.name}`", f"`{field.type}`".replace("|", r"\|"), default))
        text += f"**`{name}`**\n\n" + table(("field", "type", "default"), rows) + "\n"
    return text.rstrip("\n") + "\n"


def errors() -> str:
    known = [name for name in trellis.__all__ if kind(name) == "exception" and getattr(trellis, name) is not ModelError]
    return table(("error", "raised for"), ((f"`{name}`", role(getattr(trellis, name))) for name in known))


def audit() -> str:
    report = build_preset_model("trellis-180m", device="meta").parameter_report()
    rows = [
        (name, f"{size:,}" + (f" ({size / 1e6:.2f}M)" if name.endswith("total") else "")) for name, size in report.rows().items()
    ]
    reconciled = [f"- {note}.\n" for note in report.notes]
    return table(("row", "default configuration"), rows) + "\n" + "".join(reconciled)


def derived() -> str:
    rows = []
    for name in ("trellis-180m", "trellis-180m-nosliding", "trellis-nano"):
        model = build_preset_model(name, device="meta")
        shape = model.state_shape()
        depths = ", ".join(str(model.effective_depth(k)) for k in range(1, model.config.k_max + 1))
        instances = f"{shape.gdn_instances} / {shape.sliding_caches} / {shape.global_kv}"
        rows.append((name, instances, str(model.loop_capacity_schedule()), f"{model.expected_loops()}", depths))
    return table(("preset", "GDN / sliding / global instances", "capacity schedule", "expected loops", "effective depths"), rows)


def keys() -> str:
    return table(("keys (regular expression)", "row"), ((f"`{key}`".replace("|", r"\|"), row) for key, row in ROW_OF_KEY))


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


GENERATORS: dict[str, Callable[[], str]] = {
    "exports": exports,
    "calls": calls,
    "methods": methods,
    "records": records,
    "errors": errors,
    "audit": audit,
    "derived": derived,
    "keys": keys,
}

if __name__ == "__main__":
    PAGE.write_text(regenerate(PAGE.read_text()))
