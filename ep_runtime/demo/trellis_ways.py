"""The ways of running loops that the Trellis demo shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """Loops that a token may run, and the exit scores, of all loops but the last, at which it stops; none: it runs them all."""

    name: str
    loops: int
    thresholds: tuple[float, ...] = ()

    def __str__(self) -> str:
        return self.name

    def fields(self) -> dict[str, object]:
        """Fields of a request; none for what the server does by itself."""
        if self.loops == 1:
            return {}
        return {"max_loops": self.loops} | ({"exit_thresholds": list(self.thresholds)} if self.thresholds else {})


EXIT = 0.98
"""So high that the exit heads, which score most tokens of so easy a task above 0.9 at once, let some go on."""
WAYS = (Way("one loop, the default", 1), Way("four loops", 4), Way(f"up to four, exits at {EXIT:g}", 4, (EXIT,) * 3))
