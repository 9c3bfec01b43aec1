"""Which numbers of rows stand for all."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import pairwise


def covering_rows(most: int, kind: Callable[[int], Hashable]) -> list[int]:
    """Numbers from 1 to `most` among which every `kind` is that occurs, ascending.

    `kind` is constant over ranges. Powers of two are looked at, and halves of the way between neighbours that differ: a range that
    lies within two neighbours of one kind is not found.
    """
    kinds: dict[int, Hashable] = {}

    def look(rows: int) -> Hashable:
        if rows not in kinds:
            kinds[rows] = kind(rows)
        return kinds[rows]

    places = [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
    waiting = list(pairwise(places))
    look(places[0])
    while waiting:
        low, high = waiting.pop()
        middle = (low + high) // 2
        if look(low) != look(high) and low < middle:
            waiting += [(low, middle), (middle, high)]
    first: dict[Hashable, int] = {}
    for rows in sorted(kinds):
        first.setdefault(kinds[rows], rows)
    return sorted(first.values())
