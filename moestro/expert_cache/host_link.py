"""How an expert's bytes get from the host arena to the device.

Owns: how much of the arena is page-locked, the order in which that grows, and the way of the rest:
through a small locked ring. Does not own: the arena, or who may write what (their tables say so).

Locked entries are copied by the copy engine, and kernels read them themselves. The arena is locked
between steps, chunk by chunk, so that serving need not wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from moestro.expert_cache.arena import HostArena
from moestro.expert_cache.direct import aligned
from moestro.expert_cache.locked_ring import LockedRing
from moestro.expert_cache.page_lock import Locker, PageLock, advice, chunks, lock_whole

log = logging.getLogger(__name__)

# Bytes of the limit on locked memory that neither ring nor arena may take: each step's own input
# and output need some.
HEADROOM = 32 << 20


class HostLink:
    """From one arena to the slots of one slab. Without a `locker` nothing has to be locked: the
    device reads ordinary memory, as a CPU does."""

    def __init__(self, arena: HostArena, slab: torch.Tensor, locker: Locker | None) -> None:
        self._arena = arena
        self._slab = slab
        self.note: str | None = None  # what people should know when locking has failed
        self._lock: PageLock | None = None
        if locker is None:
            return
        self._headroom = lock_whole(aligned(HEADROOM), locker)
        blob = arena.layout.nbytes
        self._ring = LockedRing(blob, locker, slab.device) if self._headroom.locked else None
        self._lock = PageLock(arena.memory, chunks(arena.nbytes, blob), locker)

    @property
    def locking(self) -> bool:
        """Whether `lock_more` has something left to do."""
        return self._lock is not None and self._lock.more

    @property
    def readable(self) -> int:
        """How many entries, from the first, the device reads by itself."""
        if self._lock is None:
            return self._arena.table.capacity
        return self._lock.locked // self._arena.layout.nbytes

    @property
    def locked_bytes(self) -> int:
        """Page-locked bytes of the arena."""
        return 0 if self._lock is None else self._lock.locked

    def lock_more(self) -> None:
        """Lock the next chunk, some 20 ms. What the device may read by itself has grown then.

        A refusal is logged with what to do about it, and is the end: the rest stays pageable.
        """
        assert self._lock is not None
        refused = not self._lock.grow()
        if refused:
            self._refused(self._lock)
        if not self._lock.more:
            self._headroom.close()
        if not self._lock.more and not refused and self._ring is not None:
            # The last chunks' first copies may still come out of the ring.
            self._ring.drain()
            self._ring.close()

    def send(self, entries: Sequence[int], slots: Sequence[int]) -> None:
        """Start to copy arena entries to slots, on the current stream. The entries have to stay as
        they are until a mark that is set after this has passed."""
        through = []
        for entry, slot in zip(entries, slots, strict=True):
            blob, target = self._arena.blob(entry), self._slab[slot]
            if entry >= self.readable and self._ring is not None and self._ring.places:
                through.append((blob, target))
            else:  # torch reads pageable memory before it returns
                target.copy_(torch.from_numpy(blob), non_blocking=True)
        if through:
            assert self._ring is not None
            self._ring.send(through)

    def close(self) -> None:
        """Give all locks back. No copy may be running. Harmless when done before."""
        if self._lock is None:
            return
        self._lock.close()
        self._headroom.close()
        if self._ring is not None:
            self._ring.close()

    def _refused(self, lock: PageLock) -> None:
        ring = 0 if self._ring is None else self._ring.nbytes
        needed = self._arena.nbytes + ring + HEADROOM
        self.note = advice(lock.locked, needed, lock.reason or "", ring)
        log.warning(self.note)
