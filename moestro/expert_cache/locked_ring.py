"""A few page-locked blobs that copies from pageable memory pass through, on their way to a GPU.

Owns: the locked memory, the threads that copy into it, and which of its places may be written.
Does not own: what is copied where (`expert_cache.host_link` says so).

The GPU's copy engine reads only locked memory at the link's speed. A blob is copied into a place of
the ring by several threads, then from there to the device; the next blob is copied meanwhile.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from moestro.expert_cache.direct import Bytes, aligned
from moestro.expert_cache.page_lock import PAGE, Locker, lock_whole
from moestro.kernels.gpu.transfer import Mark

PLACES = 8  # blobs, where the system lets so many be locked
PIECE = 2 << 20  # bytes that one thread copies at a time
THREADS = 8


class LockedRing:
    """As many places for a blob of `nbytes` as can be locked, at most `PLACES`, maybe none."""

    def __init__(self, nbytes: int, locker: Locker, device: torch.device) -> None:
        self._blob = nbytes
        places = PLACES
        while places:
            memory = aligned(-(-places * nbytes // PAGE) * PAGE)
            self._lock = lock_whole(memory, locker)
            if self._lock.locked:
                break
            places //= 2
        self.places = places
        self.nbytes = self._lock.locked
        self._memory = [memory[at * nbytes : (at + 1) * nbytes] for at in range(places)]
        self._read = [Mark(device) for _ in range(places)]  # the last copy out of each place
        self._next = 0
        self._threads: ThreadPoolExecutor | None = None

    def send(self, pairs: Sequence[tuple[Bytes, torch.Tensor]]) -> None:
        """Start to copy blobs to device tensors, on the current stream.

        On return the blobs have been read, so that they may be overwritten.
        """
        assert self.places, "a ring without a place"
        filling: deque[tuple[int, list[Future[None]], torch.Tensor]] = deque()
        for blob, target in pairs:
            if len(filling) == self.places:
                self._forward(*filling.popleft())
            place = self._next
            self._next = (place + 1) % self.places
            self._read[place].wait()
            filling.append((place, self._fill(place, blob), target))
        while filling:
            self._forward(*filling.popleft())

    def drain(self) -> None:
        """Wait until nothing is read from it any more."""
        for mark in self._read:
            mark.wait()

    def close(self) -> None:
        """Unlock it and end the threads. No copy may be running. Harmless when done before."""
        self._lock.close()
        self.places = self.nbytes = 0
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _fill(self, place: int, blob: Bytes) -> list[Future[None]]:
        if self._threads is None:
            workers = min(THREADS, len(os.sched_getaffinity(0)))
            self._threads = ThreadPoolExecutor(workers, "locked-ring")
        into = self._memory[place]
        return [
            self._threads.submit(np.copyto, into[at : at + PIECE], blob[at : at + PIECE])
            for at in range(0, self._blob, PIECE)
        ]

    def _forward(self, place: int, parts: list[Future[None]], target: torch.Tensor) -> None:
        for part in parts:
            part.result()
        target.copy_(torch.from_numpy(self._memory[place]), non_blocking=True)
        self._read[place].set()
