"""Host memory for experts: one mapping, cut into blobs.

Owns: the bytes and, through `ArenaTable`, who may write them. Does not read disks, lock pages
(`expert_cache.host_link` does) or decide what is worth keeping beyond the table's order. The
mapping is anonymous: unless it is page-locked, only entries that have been filled count as used
memory; it is never more than `capacity * layout.nbytes`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moestro.expert_cache.arena_table import ArenaTable, Loss
from moestro.expert_cache.layout import ExpertLayout
from moestro.pages import mapped

HUGE_PAGES_FROM = 256 << 20  # bytes; below it, rounding to 2 MiB pages costs more than it saves


class HostArena:
    """`capacity` blobs of host memory. At least 2, so that one is filled while one is copied."""

    def __init__(self, layout: ExpertLayout, capacity: int, loss: Loss | None = None) -> None:
        self.table = ArenaTable(capacity, loss)
        self.layout = layout
        self.nbytes = capacity * layout.nbytes
        self.memory = mapped(self.nbytes, HUGE_PAGES_FROM)
        self._blobs = self.memory.reshape(capacity, layout.nbytes)
        self._start = int(self.memory.ctypes.data)

    def blob(self, entry: int) -> npt.NDArray[np.uint8]:
        """The bytes of one entry, [nbytes]. Write only while holding its lease."""
        blob: npt.NDArray[np.uint8] = self._blobs[entry]
        return blob

    def address(self, entry: int) -> int:
        """Where the bytes of one entry start."""
        assert 0 <= entry < self.table.capacity, f"the arena has no entry {entry}"
        return self._start + entry * self.layout.nbytes
