"""The stopwatch of a recovery: where the seconds between a failure and the next running epoch went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

START_PHASES = ("spawn", "import", "load")


@dataclass(slots=True)
class Stopwatch:
    """Runs from the first evidence of a failure until an epoch runs, whatever else fails meanwhile. Times in monotonic seconds.

    `leave`: until every living rank had left, and the cause was known. `spawn`, `import`, `load`: the slowest of the engines that
    were started, as `Loaded` says; it may overlap `leave`. `rendezvous`: opening and forming. Failed attempts add to each.
    """

    began: float
    _lap: float = 0.0
    _leave: float = 0.0
    _rendezvous: float = 0.0
    _forming: bool = False
    _start: dict[str, float] = field(default_factory=dict)

    def failed(self, now: float) -> None:
        """An epoch ended; the ranks begin to leave it."""
        if self._forming:
            self._rendezvous += now - self._lap
        self._forming, self._lap = False, now

    def left(self, now: float) -> None:
        """All have left."""
        self._leave += now - self._lap

    def loaded(self, seconds: Mapping[str, float]) -> None:
        """A started engine is loaded; `seconds` as in `Loaded`."""
        start = {phase: float(seconds.get(phase, 0.0)) for phase in START_PHASES}
        if sum(start.values()) > sum(self._start.values()):
            self._start = start

    def opening(self, now: float) -> None:
        """The next epoch is being opened."""
        self._forming, self._lap = True, now

    def running(self, now: float) -> dict[str, float]:
        """It runs: the seconds by phase, as in `Recovered`."""
        start = {phase: self._start.get(phase, 0.0) for phase in START_PHASES}
        rendezvous = self._rendezvous + (now - self._lap)
        return {"leave": self._leave, **start, "rendezvous": rendezvous, "total": now - self.began}


def in_words(seconds: Mapping[str, float]) -> str:
    """The line for the operator."""
    phases = ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items() if phase != "total")
    return f"recovered in {seconds['total']:.2f} s ({phases})"
