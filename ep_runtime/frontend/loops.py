"""How many loops a token of a request may run: from its fields, the server's defaults and what the model can. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from protocol.commands import Loops


class LoopFields(Protocol):
    """A request's fields or the server's settings; None leaves it to the latter."""

    @property
    def max_loops(self) -> int | None:
        """Most loops that a token runs."""

    @property
    def exit_thresholds(self) -> Sequence[float] | None:
        """Of each loop but the last: a generated token stops there when its exit score reaches this. Empty: every loop runs."""


class LoopsRefused(ValueError):
    """The model cannot do what a request asks. `param` names the request's field."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(reason)
        self.param = param


def choose_loops(asked: LoopFields, defaults: LoopFields, model_loops: int) -> Loops | None:
    """What the engine is told, None for one loop. `model_loops` are the most that the model runs, 1 for one that is not looped.

    The default thresholds hold for a request that names none and has no more loops than they are for: the first of them, then.
    Raises LoopsRefused.
    """
    if model_loops == 1:
        for name, value in (("max_loops", asked.max_loops), ("exit_thresholds", asked.exit_thresholds)):
            if value is not None:
                raise LoopsRefused(name, f"{name} is for looped models; this one runs its layers once")
        return None
    most = (defaults.max_loops or 1) if asked.max_loops is None else asked.max_loops
    if not 1 <= most <= model_loops:
        raise LoopsRefused("max_loops", f"max_loops is {most}; this model runs 1 to {model_loops} loops")
    if asked.exit_thresholds is None:
        thresholds = default_thresholds(most, defaults.exit_thresholds or ())
    else:
        thresholds = list(asked.exit_thresholds)
        check_thresholds(thresholds, most, "" if asked.max_loops is not None else " (the default)")
    return None if most == 1 else Loops(most=most, thresholds=thresholds)


def default_thresholds(most: int, thresholds: Sequence[float]) -> list[float]:
    """Those of the first `most - 1` loops; none where there are not so many."""
    return list(thresholds[: most - 1]) if len(thresholds) >= most - 1 else []


def check_thresholds(thresholds: Sequence[float], most: int, whose: str) -> None:
    """Raise LoopsRefused unless there are none or `most - 1`, all of them probabilities. `whose` says where `most` is from."""
    if thresholds and len(thresholds) != most - 1:
        wanted = f"one for each loop but the last, {most - 1} in all, or none" if most > 1 else "none: no loop is before the last"
        raise LoopsRefused(
            "exit_thresholds", f"exit_thresholds has {len(thresholds)} values; with max_loops {most}{whose} give {wanted}"
        )
    for place, threshold in enumerate(thresholds):
        if not 0 <= threshold <= 1:
            raise LoopsRefused("exit_thresholds", f"exit_thresholds[{place}] is {threshold}; a threshold is from 0 to 1")
