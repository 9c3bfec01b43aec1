"""The operator's list of hosts that images may be fetched from. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_RULE = re.compile(r"(?P<host>\*|(?:\*\.)?[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?", re.ASCII)
USUAL_PORTS = (80, 443)


@dataclass(frozen=True, slots=True)
class HostRule:
    """`example.org`, `*.example.org` (names below it), or `*` (any); with `:PORT`, or for the usual ports of http and https."""

    host: str
    port: int | None

    def allows(self, host: str, port: int) -> bool:
        """Whether a URL with this host (lower case, ASCII) and port may be fetched."""
        if port not in (USUAL_PORTS if self.port is None else (self.port,)):
            return False
        return self.host in ("*", host) or (self.host.startswith("*.") and host.endswith(self.host[1:]))


def parse_hosts(entries: Iterable[str]) -> tuple[HostRule, ...]:
    """Raises ValueError naming the entry that is none."""
    rules = []
    for entry in entries:
        found = _RULE.fullmatch(entry.lower())
        if found is None or int(found["port"] or 1) not in range(1, 65536):
            raise ValueError(f"{entry!r} is no host: give example.org, *.example.org, or * for any, each with :PORT or without")
        rules.append(HostRule(found["host"].strip("[]"), None if found["port"] is None else int(found["port"])))
    return tuple(rules)
