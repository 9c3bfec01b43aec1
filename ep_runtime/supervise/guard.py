"""Refuses to run over other packages of the same names: `model` or `launch` in the working directory would be imported for ours."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

NAMES = ("kernels", "launch", "model", "protocol")


class Shadowed(Exception):
    """A package of ours resolves to a file that is not ours; the message names the file."""


def refuse_shadows() -> None:
    """Raise `Shadowed` unless every package of ours lies beside `ep_runtime`. Imports none of them."""
    root = Path(__file__).resolve().parents[2]
    for name in NAMES:
        found = location(importlib.util.find_spec(name))
        if found != root / name:
            raise Shadowed(
                f"the package {name!r} resolves to {found}, not to {root / name}: "
                "start from another directory, or take what shadows it off the path (PYTHONPATH)"
            )


def location(spec: importlib.machinery.ModuleSpec | None) -> Path | None:
    """Folder of a package, with or without `__init__.py`, or the file of a plain module; None when there is none."""
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None
