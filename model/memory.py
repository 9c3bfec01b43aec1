"""The memory plan of one rank: everything that it allocates, decided and refused before anything is read.

All sizes are bytes. `plan_memory` is a pure function; `device_memory` is the one look at the machine. Scratch is an upper bound
(`model.scratch`), graphs are an estimate; all other lines are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from model.errors import MemoryPlanError
from model.scratch import StepSize, scored_rows
from model.spec import ModelSpec
from model.state.sizes import DTYPE_BYTES, bytes_per_block, bytes_per_slot

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
DEFAULT_SLOTS = 256
"""Slots when none are asked for, memory permitting."""
HOST_CACHE_LIMIT = 4 * GIB
"""On a CPU, an automatic cache takes no more than this (or one longest sequence): memory is shared with other programs there."""
RESERVE = {"cpu": 256 << 20, "cuda": 768 << 20}
"""What the plan leaves to the libraries: allocator fragments, cuBLAS workspaces, communicator buffers, compiled kernels."""
GRAPH_BYTES = 8 << 20
"""An estimate of what the driver keeps of one captured step, beside its tensors."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`total` is what this rank may count as its device's memory, `used` what is taken of it already, by anyone."""

    kind: str
    total: int
    used: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What the plan is made for. `num_blocks` or `max_slots` of None: as many as fit and can be of use.

    `step_bytes` bounds the temporaries of a step: `model.scratch` has that of decoders. `held` are the experts of this rank in a
    layer, `head` says that it samples, `kernels` that the fused forms run, `graphs` that decode steps are captured. `images` are
    lines of what images take, where the model has vision; `shared` are lines of what the rank shares with others, such as buffers
    that its peers read. Of `owners` ranks that divide the sequences, each keeps what its part of the slots leaves.
    """

    step_bytes: Callable[[StepSize], int]
    dtype: str
    weight_bytes: int
    block_size: int
    max_num_batched_tokens: int
    max_model_len: int
    max_slots: int | None = None
    num_blocks: int | None = None
    world: int = 1
    owners: int = 1
    held: int = 0
    head: bool = True
    kernels: bool = False
    graphs: bool = False
    images: tuple[tuple[str, int], ...] = ()
    shared: tuple[tuple[str, int], ...] = ()


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


def largest_step(spec: ModelSpec, needs: Needs, max_slots: int, device: str) -> StepSize:
    """The largest step that admission lets through, for this rank."""
    return StepSize(
        rows=needs.max_num_batched_tokens,
        slots=max_slots,
        scored=scored_rows(spec.cut_points, spec.single_chunk, needs.max_num_batched_tokens),
        positions=-(-needs.max_model_len // needs.block_size) * needs.block_size,
        element=DTYPE_BYTES[needs.dtype],
        world=needs.world,
        held=needs.held,
        device=device,
        kernels=needs.kernels,
        head=needs.head,
    )


def scratch_bytes(spec: ModelSpec, needs: Needs, max_slots: int, device: str = "cpu") -> int:
    """An upper bound on the temporaries of the largest step."""
    return needs.step_bytes(largest_step(spec, needs, max_slots, device))


def sampler_bytes(vocab_size: int, max_slots: int) -> int:
    """What the sampler keeps: a hash word a token; for each slot a token's count (int32) and whether the prompt has it (bool)."""
    return 4 * vocab_size + 5 * vocab_size * max_slots


def graph_bytes(spec: ModelSpec, needs: Needs, max_slots: int, device: str) -> tuple[int, int]:
    """(number of captured steps, an estimate of their bytes): one for each power of two up to the slots.

    They share the temporaries of the largest one; each keeps its logits, and in GRAPH_BYTES what a digest reads and the
    driver needs. Sampling is in no graph.
    """
    buckets = [*(1 << power for power in range((max_slots - 1).bit_length())), max_slots]
    step = replace(largest_step(spec, needs, max_slots, device), rows=max_slots, scored=0, head=False)
    logits = 4 * spec.vocab_size * sum(buckets) if needs.head else 0
    return len(buckets), needs.step_bytes(step) + logits + len(buckets) * GRAPH_BYTES


def plan_memory(spec: ModelSpec, needs: Needs, memory: DeviceMemory, utilization: float) -> MemoryPlan:
    """Slots, and blocks for one rank, within `utilization` of the total, less what is used already.

    Slots not given: DEFAULT_SLOTS, halved until the recurrent states take at most half of what the weights leave. Blocks not given:
    what is left, but no more than all slots could fill, and on a CPU no more than HOST_CACHE_LIMIT. Raises MemoryPlanError, with
    the sum, when something given does not fit or when not even one sequence of max_model_len does (it says which length would).
    """
    budget = int(memory.total * utilization) - memory.used
    reserve = RESERVE.get(memory.kind, RESERVE["cuda"])
    slot = bytes_per_slot(spec, needs.dtype)
    max_slots = needs.max_slots or _slots_that_fit(slot, budget - needs.weight_bytes - reserve, needs.owners)
    kept = -(-max_slots // needs.owners)
    block = bytes_per_block(spec, needs.block_size, needs.dtype)
    one = -(-needs.max_model_len // needs.block_size)
    fixed = (
        ("weights", needs.weight_bytes),
        (f"recurrent state, {kept} slots of {slot:,} B", kept * slot),
        *_working_lines(spec, needs, max_slots, memory.kind),
        *needs.images,
        *needs.shared,
        ("reserve", reserve),
    )
    left = budget - sum(size for _, size in fixed)
    given = needs.num_blocks is not None
    blocks = needs.num_blocks if needs.num_blocks is not None else _blocks_that_fit(block, left, one, kept, memory.kind)
    shown = blocks if given else max(blocks, one)
    lines = (
        fixed[0],
        (f"KV cache, {shown} blocks of {needs.block_size} x {block // needs.block_size:,} B", shown * block),
        *fixed[1:],
    )
    if blocks < one or blocks * block > left:
        raise MemoryPlanError(_refusal(lines, budget, blocks if given else None, needs, left // block if block else 0))
    return MemoryPlan(num_blocks=blocks, max_slots=max_slots, lines=lines, budget=budget)


def _working_lines(spec: ModelSpec, needs: Needs, max_slots: int, kind: str) -> list[tuple[str, int]]:
    """What steps work with: scratch, and where they exist the sampler, the block tables and the graphs."""
    size = largest_step(spec, needs, max_slots, kind)
    scratch = scratch_bytes(spec, needs, max_slots, kind)
    lines = [(f"scratch, {size.rows} tokens and {size.logit_rows} rows of logits a step", scratch)]
    if needs.head:
        lines.append((f"sampler, {max_slots} slots of {5 * spec.vocab_size:,} B", sampler_bytes(spec.vocab_size, max_slots)))
    if needs.graphs:
        width = -(-needs.max_model_len // needs.block_size)
        kept = -(-max_slots // needs.owners)
        lines.append((f"block tables, {kept} slots of {width} blocks", 4 * kept * width))
        count, size_of_graphs = graph_bytes(spec, needs, max_slots, kind)
        lines.append((f"graphs of {count} decode steps (estimate)", size_of_graphs))
    return lines


def _slots_that_fit(slot: int, left: int, owners: int) -> int:
    """DEFAULT_SLOTS, halved until the states of an owner's part of them take at most half of `left`."""
    slots = DEFAULT_SLOTS
    while slots > 1 and -(-slots // owners) * slot > left // 2:
        slots //= 2
    return slots


def _blocks_that_fit(block: int, left: int, one: int, slots: int, kind: str) -> int:
    """Blocks for `left` bytes, bounded by what `slots` use and on a CPU by HOST_CACHE_LIMIT. `one` is for a longest sequence."""
    useful = one * slots
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
