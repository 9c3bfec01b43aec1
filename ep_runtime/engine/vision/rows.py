"""The rows of images that one rank's slots hold for their prefill, and what their images do to the positions behind them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model.state.checksum import checksum
from model.state.paged import check_tensor
from model.vision.positions import position_shift
from protocol.commands import Span, Vision
from protocol.errors import EpCommandFailed, EpDiverged
from protocol.slots import SlotStatus, SlotTable


class VisionRows:
    """Tensors `[rows, width]` by slot: those of all grids of its VISION that were not skipped, in position order.

    VISION reserves them before the vote and keeps them once they are there; they go when the prefill has passed the last grid, or
    with the slot. `shifts[slot]` is what images add to the place of a row behind them.
    """

    def __init__(self, max_slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shifts = [0] * max_slots
        self._width = width
        self._dtype = dtype
        # "cuda" and "cuda:0" are one device to a user but not to a comparison: an allocation tells the full name.
        self._device = torch.empty(0, device=device).device
        self._held: dict[int, torch.Tensor] = {}
        self._reserved: torch.Tensor | None = None
        self._offered: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all rows held."""
        return sum(rows.nbytes for rows in self._held.values())

    def offer(self, rows: torch.Tensor) -> None:
        """On the head: `rows [n, width]` are those of the next command, which is a VISION. Raises ValueError for another layout."""
        layout = (rows.dim(), rows.shape[-1] if rows.dim() else 0, rows.dtype, rows.device)
        due = (2, self._width, self._dtype, self._device)
        if layout != due:
            raise ValueError(
                f"rows of {tuple(rows.shape)} {rows.dtype} on {rows.device}, due are [n, {due[1]}] {due[2]} on {due[3]}"
            )
        self._offered = rows

    def check_offer(self, rows: int) -> None:
        """Raise EpCommandFailed unless `rows` rows are on offer. None need to be for none."""
        offered = 0 if self._offered is None else self._offered.shape[0]
        if offered != rows:
            raise EpCommandFailed(f"{offered} rows of images are on offer, the command takes {rows}: it cannot be sent")

    def reserve(self, rows: int) -> None:
        """Memory for the rows of a VISION that is being prepared. What the allocator raises is this rank's vote."""
        if rows:
            self._reserved = torch.empty(rows, self._width, dtype=self._dtype, device=self._device)

    def filled(self) -> torch.Tensor | None:
        """What is reserved, on the head with the rows on offer in it; None where no row is due."""
        if self._reserved is not None and self._offered is not None:
            self._reserved.copy_(self._offered)
        return self._reserved

    def keep(self, slot: int, images: Vision) -> None:
        """The slot has the images of this VISION, and holds what was reserved for them."""
        if self._reserved is not None:
            self._held[slot] = self._reserved
            self._reserved = None
        self.shifts[slot] = position_shift(images.grids)

    def release(self) -> None:
        """Let go of what is reserved or on offer and was not kept: after every command, whatever became of it."""
        self._reserved = self._offered = None

    def held(self, slot: int) -> torch.Tensor | None:
        """`[rows, width]` of a slot's images."""
        return self._held.get(slot)

    def copy(self, source: int, target: int) -> None:
        """The target has the source's images behind it."""
        self.drop(target)
        self.shifts[target] = self.shifts[source]

    def drop(self, slot: int) -> None:
        """The slot has no images."""
        self._held.pop(slot, None)
        self.shifts[slot] = 0

    def pass_by(self, spans: Sequence[Span], slots: SlotTable) -> None:
        """After a forward: drop the rows of its slots whose images are all behind them now."""
        if not self._held:
            return
        for span in spans:
            state = slots[span.slot]
            if span.slot in self._held and (state is None or not state.rows):
                del self._held[span.slot]

    def check_held(self, spans: Sequence[Span], slots: SlotTable, rank: int) -> None:
        """Raise EpDiverged when the table says that a slot of `spans` holds rows which are not here."""
        if not slots.vision_rows:
            return
        for span in spans:
            state = slots[span.slot]
            due = 0 if state is None else state.rows
            if due and self._count(span.slot) != due:
                raise EpDiverged(f"rank {rank} holds {self._count(span.slot)} rows of the images of slot {span.slot}, not {due}")

    def section_sum(self, slots: SlotTable) -> dict[str, torch.Tensor]:
        """`rows`: an int64 scalar on the device, of what the ACTIVE slots hold, in slot order; nothing when none holds any."""
        live = [state.slot for state in slots if state is not None and state.status is SlotStatus.ACTIVE]
        sums = [checksum(self._held[slot]) for slot in live if slot in self._held]
        return {"rows": checksum(torch.stack(sums)[:, None])} if sums else {}

    def check_integrity(self, slots: SlotTable) -> None:
        """Raise RuntimeError when what is held is not what the table says, or not as declared."""
        for slot, state in enumerate(slots):
            due = 0 if state is None else state.rows
            if self._count(slot) != due:
                raise RuntimeError(f"slot {slot} holds {self._count(slot)} rows of images, the table says {due}")
            shift = 0 if state is None else position_shift(state.grids)
            if self.shifts[slot] != shift:
                raise RuntimeError(f"the images of slot {slot} shift positions by {shift}, not by {self.shifts[slot]}")
            if due:
                shape = (due, self._width)
                check_tensor(f"rows of images of slot {slot}", self._held[slot], shape, self._dtype, self._device)
        if self._reserved is not None or self._offered is not None:
            raise RuntimeError("rows of images are reserved or on offer between commands")

    def close(self) -> None:
        """Drop everything."""
        self._held.clear()
        self.shifts = [0] * len(self.shifts)
        self.release()

    def _count(self, slot: int) -> int:
        rows = self._held.get(slot)
        return 0 if rows is None else rows.shape[0]
