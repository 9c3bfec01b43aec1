"""How long the parts of an engine's start took, from what its progress page said at a few moments."""

from __future__ import annotations

from protocol.progress import Phase, Position

BEFORE_LOADING = frozenset({Phase.STARTING, Phase.STANDBY})


class StartClock:
    """Times are `time.monotonic()` seconds. A start has three parts: spawn, until its Python runs; import, until it reads its
    Welcome; load, until it has its weights. Only time after `wanted` counts: a standby did most of it before.
    """

    def __init__(self) -> None:
        self._wanted: float | None = None
        self._began: float | None = None
        self._loading: float | None = None
        self._looked = 0.0

    def want(self, since: float) -> None:
        """Somebody waits for it since then."""
        self._wanted = since

    @property
    def learns(self) -> bool:
        """Whether another look could tell something: it has not begun, or somebody waits for it to load."""
        return self._began is None or (self._wanted is not None and self._loading is None)

    def look(self, now: float, position: Position) -> None:
        """Take one reading of the page. A move that was missed is set to the look before."""
        moved = now - position.idle_s
        if self._began is None and position.moves:
            self._began = moved if position.phase is Phase.STARTING else self._looked
        if self._loading is None and position.phase not in BEFORE_LOADING:
            self._loading = moved if position.phase is Phase.LOADING else self._looked
        self._looked = now

    def seconds(self, now: float) -> dict[str, float]:
        """The parts, at the moment when it says that it has loaded."""
        wanted = now if self._wanted is None else self._wanted
        began = max(wanted, wanted if self._began is None else self._began)
        loading = max(began, began if self._loading is None else self._loading)
        return {"spawn": began - wanted, "import": loading - began, "load": max(0.0, now - loading)}
