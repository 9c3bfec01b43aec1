"""What `make fuzz` runs: the parts of each target, the share of its time that each gets, and how it is run."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz import decoders, doors, inbox, joins, links
from tests.fuzz.front import open_front
from tests.fuzz.loop import Plan, run_cases

BATCH_SECONDS = 300.0
"""A batch of visits to a server, each of which has a bound of its own."""


def _http(plan: Plan) -> None:
    with open_front() as front:
        run_cases("http", front.case, plan, BATCH_SECONDS)
        front.check_growth()


Part = tuple[float, Callable[[Plan], object]]
TARGETS: dict[str, dict[str, Part]] = {
    "wire": {
        "decoders": (0.5, lambda plan: run_cases("decoders", decoders.case, plan)),
        "links": (0.2, lambda plan: run_cases("links", links.case, plan)),
        "doors": (0.1, lambda plan: run_cases("doors", doors.case, plan)),
        "inbox": (0.1, lambda plan: run_cases("inbox", inbox.case, plan)),
        "joins": (0.1, lambda plan: run_cases("joins", joins.case, plan, BATCH_SECONDS)),
    },
    "http": {"http": (1.0, _http)},
}
