"""Refuses to run over other packages of the same names: `model` or `launch` in the working directory would be imported for ours."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

import ep_runtime

NAMES = ("kernels", "launch", "model", "protocol")


class Shadowed(Exception):
    """A package of ours resolves to a file that is not ours; the message names the file."""


def refuse_shadows() -> None:
    """Raise `Shadowed` unless every package of ours lies beside `ep_runtime`. Imports none of them."""
    root = Path(ep_runtime.__file__).resolve().parent.parent
    for name in NAMES:
        found = location(importlib.util.find_spec(name))
        if found != root / name:
            raise Shadowed(
                f"the package {name!r} resolves to {found}, not to {root / name}: "
                "start from another directory, or take what shadows it off the path (PYTHONPATH)"
            )


def location(spec: importlib.machinery.ModuleSpec | None) -> Path | None:
    """Folder of a package, or the file of a plain module; None when there is none."""
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin).resolve()
    return origin.parent if origin.name == "__init__.py" else origin
