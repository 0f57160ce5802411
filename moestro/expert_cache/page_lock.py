"""Page-locks memory for a GPU's copies, and says why when the system will not.

Owns: bringing pages in with several threads, registering them chunk by chunk, and giving back
what was registered. Does not own the memory, and decides nothing about going on without.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

PAGE = 4096
CHUNK = 128 << 20  # bytes registered by one call, about: some 20 ms, so that steps can come between
PIECE = 16 << 20  # bytes that one thread brings in at a time
THREADS = 16  # more do not make the kernel clear pages faster
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; the mmap module does not name it
PORTABLE = 1  # cudaHostRegisterPortable: locked for every device

Bytes = npt.NDArray[np.uint8]


class Locker(Protocol):
    """What registers memory with a device."""

    def lock(self, address: int, nbytes: int) -> str | None:
        """Page-lock a range; None, or why it could not be."""

    def unlock(self, address: int) -> None:
        """Undo `lock` of the range that starts here."""


class CudaLocker:
    """cudaHostRegister, by torch."""

    def lock(self, address: int, nbytes: int) -> str | None:
        """See `Locker`."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(address, nbytes, PORTABLE)
        if int(code) == 0:
            return None
        # CUDA also keeps the error for whoever asks next, which is any kernel's launch. Let it
        # be this one: torch has no other way to clear it.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return f"cudaHostRegister: {runtime.cudaGetErrorString(code)}"

    def unlock(self, address: int) -> None:
        """See `Locker`. A failure is not reported: it means that the context is gone."""
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class PageLock:
    """Memory that is locked chunk by chunk, from its start on, until the system refuses one.

    What was locked stays so until `close`.
    """

    def __init__(self, memory: Bytes, sizes: Sequence[int], locker: Locker) -> None:
        self._memory = memory
        self._start = int(memory.ctypes.data)
        self._locker = locker
        self._todo = deque(sizes)
        self._held: list[int] = []  # addresses
        self.locked = 0  # bytes, from the start
        self.reason: str | None = None  # why the next chunk could not be

    @property
    def more(self) -> bool:
        """Whether there is a chunk to try."""
        return bool(self._todo)

    def grow(self) -> bool:
        """Bring the next chunk in and lock it; False when the system refuses, for good."""
        size = self._todo.popleft()
        populate(self._memory[self.locked : self.locked + size])
        address = self._start + self.locked
        self.reason = self._locker.lock(address, size)
        if self.reason is not None:
            self._todo.clear()
            return False
        self._held.append(address)
        self.locked += size
        return True

    def close(self) -> None:
        """Unlock, last first. No copy may be running. Harmless when done before."""
        self._todo.clear()
        self.locked = 0
        while self._held:
            self._locker.unlock(self._held.pop())


def lock_whole(memory: Bytes, locker: Locker) -> PageLock:
    """Lock all of `memory`, which starts at a page, by one call; its `locked` is 0 if refused."""
    lock = PageLock(memory, [len(memory)], locker)
    lock.grow()
    return lock


def chunks(total: int, blob: int) -> list[int]:
    """Sizes of the chunks of `total` bytes. They end at pages and at ends of blobs.

    A copy that crosses from one registered chunk to the next may be refused, so no blob does.
    """
    unit = math.lcm(blob, PAGE)
    size = max(1, CHUNK // unit) * unit
    return [min(size, total - at) for at in range(0, total, size)]


def populate(memory: Bytes) -> None:
    """Bring in every page of `memory`, which starts at a page, with several threads. Contents stay,
    also what others write meanwhile. Where the kernel is too old, locking brings them in."""
    pieces = [memory[at : at + PIECE] for at in range(0, len(memory), PIECE)]
    if len(pieces) == 1:
        _populate_write(memory)
        return
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(min(THREADS, cores, len(pieces)), "populate") as pool:
        list(pool.map(_populate_write, pieces))


def _populate_write(piece: Bytes) -> bool:
    madvise = ctypes.CDLL(None).madvise  # mmap.madvise would hold the GIL
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(piece.ctypes.data, len(piece), POPULATE_WRITE) == 0)


def limits() -> tuple[int | None, int | None]:
    """RLIMIT_MEMLOCK in bytes, soft and hard; None is unlimited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return _limit(soft), _limit(hard)


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def advice(locked: int, needed: int, reason: str, ring: int) -> str:
    """For people: how much of the host arena could be locked, what that means, how to mend it.

    All in bytes; `ring` is what copies of the rest pass through.
    """
    soft, hard = limits()
    way = f"a locked ring of {_amount(ring)}" if ring else "pageable copies"
    mend = (
        f"The limit on locked memory is {_amount(soft)} (hard: {_amount(hard)}), needed are "
        f"{_amount(needed)}: raise it with `ulimit -l {-(-needed // 1024)}` or `ulimit -l "
        "unlimited`, LimitMEMLOCK=infinity in a systemd unit, or --ulimit memlock=-1 for docker"
        if soft is not None
        else "The limit on locked memory is unlimited, so memory itself is short: lower "
        "--host-memory"
    )
    return (
        f"{_amount(locked)} of the {_amount(needed)} of host memory that the GPU should read could "
        f"be page-locked ({reason}). Experts outside it go through {way}, and a decode step that "
        f"misses one is computed as a sweep, which is slower. {mend}"
    )


def _amount(nbytes: int | None) -> str:
    if nbytes is None:
        return "unlimited"
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"
