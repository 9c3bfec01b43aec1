"""The slots' block tables on the device, for captured forwards: what changes in a step is all that is sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class BlockTables:
    """`[max_slots, width]` int32 on the device. Entries past a slot's blocks are stale and never read."""

    def __init__(self, max_slots: int, width: int, device: torch.device) -> None:
        self.width = width
        self.tensor = torch.zeros(max_slots, width, dtype=torch.int32, device=device)
        self._device = device
        self._places: list[int] = []
        self._values: list[int] = []

    def set(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Blocks `first ...` of a slot; on the device after the next `flush`."""
        start = slot * self.width + first
        self._places.extend(range(start, start + len(blocks)))
        self._values.extend(blocks)

    def flush(self) -> None:
        """Send what has changed, in one copy that the host does not wait for. A place that changed twice keeps the last value."""
        if not self._places:
            return
        latest = dict(zip(self._places, self._values, strict=True))
        self._places.clear()
        self._values.clear()
        host = torch.from_numpy(np.array([list(latest), list(latest.values())], dtype=np.int64)).pin_memory()
        places, values = host.to(self._device, non_blocking=True)
        self.tensor.view(-1).index_copy_(0, places, values.to(torch.int32))
