"""Where this process stands: its rank and neighbours as the launcher says, and what the machine has. No device is touched."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ep_runtime.config import Facts


class PlaceError(Exception):
    """The launcher's variables are missing or contradict each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank among `world`, as torchrun's variables say; without torchrun, rank 0 of 1."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    job: str = ""
    """Names this job among others of the same user on this host; empty without a launcher."""
    attempt: str = "0"
    """Which start of the job this is: torchrun's store outlives the ranks that it starts again."""


def read_place(environ: Mapping[str, str]) -> Place:
    """The place from RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and what torchrun says of its run.

    Raises `PlaceError`.
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return Place()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    values = {}
    for name in names:
        text = environ.get(name, "")
        if not text.isdecimal():
            raise PlaceError(f"{name} is {text!r}, not a number; torchrun sets {', '.join(names)} and MASTER_ADDR together")
        values[name] = int(text)
    if not (values["RANK"] < values["WORLD_SIZE"] and values["LOCAL_RANK"] < values["LOCAL_WORLD_SIZE"] <= values["WORLD_SIZE"]):
        raise PlaceError(f"the launcher's ranks contradict each other: {values}")
    return Place(
        rank=values["RANK"],
        world=values["WORLD_SIZE"],
        local_rank=values["LOCAL_RANK"],
        local_world=values["LOCAL_WORLD_SIZE"],
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=values["MASTER_PORT"],
        job=f"{environ.get('TORCHELASTIC_RUN_ID', '')}-{values['MASTER_PORT']}",
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def read_facts(place: Place, environ: Mapping[str, str]) -> Facts:
    """What `resolve` needs to know of this host."""
    return Facts(
        gpus=count_gpus(environ),
        cores=own_cores(),
        world=place.world,
        local_world=place.local_world,
        master_addr=place.master_addr,
        master_port=place.master_port,
    )


def own_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def count_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that an engine could use, judged from device nodes, CUDA_VISIBLE_DEVICES and the build of torch."""
    if importlib.metadata.version("torch").endswith("+cpu"):
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    nodes = [node for node in devices.glob("nvidia*") if node.name.removeprefix("nvidia").isdecimal()]
    if visible is None or not nodes:
        return len(nodes)
    if visible.strip() in ("", "-1"):
        return 0
    return len(visible.split(","))
