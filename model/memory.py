"""The memory plan of one rank: what its weights, caches, states and scratch take, decided and refused before anything is read.

All sizes are bytes. `plan_memory` is a pure function; `device_memory` is the one look at the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from model.errors import MemoryPlanError
from model.spec import ModelSpec
from model.state.sizes import DTYPE_BYTES, bytes_per_block, bytes_per_slot

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
DEFAULT_SLOTS = 256
"""Slots when none are asked for, memory permitting."""
HOST_CACHE_LIMIT = 4 * GIB
"""On a CPU, an automatic cache takes no more than this (or one longest sequence): memory is shared with other programs there."""
SCORED_ROWS = 256
"""Prompt rows whose logits one step may ask for (prompt logprobs), beside one row a slot: a row of logits is large."""
RESERVE = {"cpu": 256 << 20, "cuda": 768 << 20}
"""What the plan leaves to the libraries: allocator fragments, cuBLAS workspaces, communicator buffers."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`total` is what this rank may count as its device's memory, `used` what is taken of it already, by anyone."""

    kind: str
    total: int
    used: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What the plan is made for. `num_blocks` or `max_slots` of None: as many as fit and can be of use."""

    dtype: str
    weight_bytes: int
    block_size: int
    max_num_batched_tokens: int
    max_model_len: int
    max_slots: int | None = None
    num_blocks: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The decision, and the sum behind it. `lines` are (what, bytes) and add up to `planned`, which `budget` covers."""

    num_blocks: int
    max_slots: int
    lines: tuple[tuple[str, int], ...]
    budget: int

    @property
    def planned(self) -> int:
        """Bytes of all lines together."""
        return sum(size for _, size in self.lines)

    def table(self) -> str:
        """The plan as text, one line an item."""
        return _table(self.lines, self.budget)


def device_memory(device: torch.device, local_ranks: int = 1) -> DeviceMemory:
    """A GPU's total and used memory; on the CPU, an equal share of what the host has available among its ranks, none of it used."""
    if device.type == "cpu":
        import psutil

        return DeviceMemory("cpu", psutil.virtual_memory().available // local_ranks, 0)
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(device.type, total, total - free)


def scratch_bytes(spec: ModelSpec, needs: Needs, max_slots: int) -> int:
    """An estimate of the largest forward's temporaries, in the model's dtype except for float32 logits and accumulators.

    A row holds about 16 hidden-sized values at once (residual, norm, projections, attention, two reductions in float32), and 4
    more for each of its experts (gathered input, gate and up, output). Logits are kept twice (raw, and the sampler's), for a row
    a slot and for SCORED_ROWS prompt rows.
    """
    element = DTYPE_BYTES[needs.dtype]
    row = spec.hidden_size * (16 + 4 * spec.experts_per_token) * element
    logit_rows = max_slots + min(SCORED_ROWS, needs.max_num_batched_tokens)
    return needs.max_num_batched_tokens * row + 2 * logit_rows * spec.vocab_size * 4


def plan_memory(spec: ModelSpec, needs: Needs, memory: DeviceMemory, utilization: float) -> MemoryPlan:
    """Blocks and slots for one rank within `utilization` of the total, less what is used already.

    Slots not given: DEFAULT_SLOTS, halved until the recurrent states take at most half of what the weights leave. Blocks not given:
    what is left, but no more than all slots could fill, and on a CPU no more than HOST_CACHE_LIMIT. Raises MemoryPlanError, with
    the sum, when something given does not fit or when not even one sequence of max_model_len does (it says which length would).
    """
    budget = int(memory.total * utilization) - memory.used
    reserve = RESERVE.get(memory.kind, RESERVE["cuda"])
    slot = bytes_per_slot(spec, needs.dtype)
    max_slots = needs.max_slots or _slots_that_fit(slot, budget - needs.weight_bytes - reserve)
    block = bytes_per_block(spec, needs.block_size, needs.dtype)
    fixed = (
        ("weights", needs.weight_bytes),
        (f"recurrent state, {max_slots} slots of {slot:,} B", max_slots * slot),
        (f"scratch, {needs.max_num_batched_tokens} tokens a step", scratch_bytes(spec, needs, max_slots)),
        ("reserve", reserve),
    )
    left = budget - sum(size for _, size in fixed)
    one = -(-needs.max_model_len // needs.block_size)
    given = needs.num_blocks is not None
    blocks = needs.num_blocks if needs.num_blocks is not None else _blocks_that_fit(block, left, one, max_slots, memory.kind)
    shown = blocks if given else max(blocks, one)
    lines = (
        fixed[0],
        (f"KV cache, {shown} blocks of {needs.block_size} x {block // needs.block_size:,} B", shown * block),
        *fixed[1:],
    )
    if blocks < one or blocks * block > left:
        raise MemoryPlanError(_refusal(lines, budget, blocks if given else None, needs, left // block if block else 0))
    return MemoryPlan(num_blocks=blocks, max_slots=max_slots, lines=lines, budget=budget)


def _slots_that_fit(slot: int, left: int) -> int:
    """DEFAULT_SLOTS, halved until their states take at most half of `left`."""
    slots = DEFAULT_SLOTS
    while slots > 1 and slots * slot > left // 2:
        slots //= 2
    return slots


def _blocks_that_fit(block: int, left: int, one: int, max_slots: int, kind: str) -> int:
    """Blocks for `left` bytes, bounded by use and on a CPU by HOST_CACHE_LIMIT. `one` is what a longest sequence takes."""
    useful = one * max_slots
    if block == 0:
        return useful
    if kind == "cpu":
        useful = min(useful, max(one, HOST_CACHE_LIMIT // block))
    return min(useful, max(0, left) // block)


def _refusal(lines: tuple[tuple[str, int], ...], budget: int, given: int | None, needs: Needs, fit: int) -> str:
    """Why the plan is refused, with the sum and what would fit."""
    one = -(-needs.max_model_len // needs.block_size)
    if given is not None and given < one:
        held = given * needs.block_size
        why = f"{given} blocks of {needs.block_size} hold {held} positions, but max_model_len is {needs.max_model_len}"
    elif fit > 0:
        why = f"does not fit; {fit} blocks would, a max_model_len of {fit * needs.block_size} (given: {needs.max_model_len})"
    else:
        why = "does not fit, at any max_model_len"
    return f"memory plan: {why}\n{_table(lines, budget)}"


def _table(lines: tuple[tuple[str, int], ...], budget: int) -> str:
    """Aligned text: the lines, their sum and the budget, in GiB."""
    planned = sum(size for _, size in lines)
    rows = [*lines, ("total", planned), ("budget", budget)]
    width = max(len(what) for what, _ in rows)
    return "\n".join(f"  {what:<{width}}  {size / GIB:>10.3f} GiB" for what, size in rows)
