"""Host memory for experts: one mapping, cut into blobs.

Owns: the bytes, whether they are page-locked and, through `ArenaTable`, who may write them. Does
not read disks or decide what is worth keeping beyond the table's order. The mapping is anonymous:
unless it is page-locked, only entries that have been filled count as used memory; it is never
more than `capacity * layout.nbytes`.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from moestro.expert_cache.arena_table import ArenaTable
from moestro.expert_cache.layout import ExpertLayout
from moestro.expert_cache.page_lock import (
    CudaLocker,
    Locker,
    LockReport,
    PageLock,
    chunks,
    populate,
)

HUGE_PAGES_FROM = 256 << 20  # bytes; below it, rounding to 2 MiB pages costs more than it saves


class HostArena:
    """`capacity` blobs of host memory. At least 2, so that one is filled while one is copied.

    `pinned` asks for page-locked memory: all of it is brought in at once. Whether it was granted
    says `pinned` afterwards, and `lock_report` why not; the arena serves either way. `close`
    gives the lock back.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        capacity: int,
        *,
        pinned: bool = False,
        locker: Locker | None = None,
    ) -> None:
        self.table = ArenaTable(capacity)
        self.nbytes = capacity * layout.nbytes
        self._blob = layout.nbytes
        mapping = mmap.mmap(-1, self.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self.nbytes >= HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        # The array keeps the mapping alive; it is unmapped when the last view is gone.
        flat = np.frombuffer(mapping, np.uint8)
        self._blobs: npt.NDArray[np.uint8] = flat.reshape(capacity, layout.nbytes)
        self._start = int(flat.ctypes.data)
        self._lock: PageLock | None = None
        if pinned:
            populate(flat)
            sizes = chunks(self.nbytes, layout.nbytes)
            self._lock = PageLock(self._start, sizes, locker or CudaLocker())

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked now."""
        return self._lock is not None and self._lock.held

    @property
    def lock_report(self) -> LockReport | None:
        """How page-locking went; None when it was not asked for."""
        return self._lock.report if self._lock is not None else None

    def blob(self, entry: int) -> npt.NDArray[np.uint8]:
        """The bytes of one entry, [nbytes]. Write only while holding its lease."""
        blob: npt.NDArray[np.uint8] = self._blobs[entry]
        return blob

    def address(self, entry: int) -> int:
        """Where the bytes of one entry start, for kernels that read them; good until `close`."""
        assert 0 <= entry < self.table.capacity, f"the arena has no entry {entry}"
        return self._start + entry * self._blob

    def close(self) -> None:
        """Give the page lock back. No copy may be running. Harmless when done before."""
        if self._lock is not None:
            self._lock.close()
