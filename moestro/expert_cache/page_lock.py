"""Page-locks memory for a GPU's copies, and says why when the system will not.

Owns: bringing pages in with several threads, registering them chunk by chunk, and giving back
what was registered. Does not own the memory, and decides nothing about going on without.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

PAGE = 4096
CHUNK = 1 << 30  # bytes registered by one call, about
PIECE = 64 << 20  # bytes that one thread brings in at a time
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


@dataclass(frozen=True, slots=True)
class LockReport:
    """How page-locking went. All in bytes; a limit of None is unlimited."""

    wanted: int
    locked: int  # all of it, or how much could be locked before it failed
    reason: str | None  # why it failed
    soft: int | None  # RLIMIT_MEMLOCK
    hard: int | None

    @property
    def note(self) -> str | None:
        """For start-up to print: what failed and how to mend it. None when nothing did."""
        if self.reason is None:
            return None
        advice = (
            f"the limit on locked memory is {_amount(self.soft)} (hard: {_amount(self.hard)}); "
            "raise it with `ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd unit, or "
            "--ulimit memlock=-1 for docker"
            if self.soft is not None
            else "the limit on locked memory is unlimited, so memory itself is short: lower "
            "--host-memory"
        )
        return (
            f"the host arena is not page-locked, so copies to the GPU are slower: "
            f"{_amount(self.locked)} of {_amount(self.wanted)} could be locked "
            f"({self.reason}); {advice}"
        )


class PageLock:
    """Chunks of memory that are locked together or not at all. `close` gives them back."""

    def __init__(self, address: int, sizes: Sequence[int], locker: Locker) -> None:
        self._locker = locker
        self._locked: list[int] = []
        done, reason = 0, None
        for size in sizes:
            try:
                reason = locker.lock(address + done, size)
            except BaseException:
                self.close()
                raise
            if reason is not None:
                self.close()
                break
            self._locked.append(address + done)
            done += size
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        self.report = LockReport(sum(sizes), done, reason, _limit(soft), _limit(hard))

    @property
    def held(self) -> bool:
        """Whether the memory is locked now."""
        return bool(self._locked)

    def close(self) -> None:
        """Unlock, last first. No copy may be running. Harmless when done before."""
        while self._locked:
            self._locker.unlock(self._locked.pop())


def chunks(total: int, blob: int) -> list[int]:
    """Sizes of the chunks of `total` bytes. They end at pages and at ends of blobs.

    A copy that crosses from one registered chunk to the next may be refused, so no blob does.
    """
    unit = math.lcm(blob, PAGE)
    size = max(1, CHUNK // unit) * unit
    return [min(size, total - at) for at in range(0, total, size)]


def populate(memory: Bytes) -> None:
    """Bring in every page of fresh `memory`, which starts at a page, with several threads."""
    cores = len(os.sched_getaffinity(0))
    pieces = [memory[at : at + PIECE] for at in range(0, len(memory), PIECE)]
    with ThreadPoolExecutor(min(THREADS, cores), "populate") as pool:
        list(pool.map(_bring_in, pieces))


def _bring_in(piece: Bytes) -> None:
    if not _populate_write(piece):
        piece[::PAGE] = 0  # older kernels; a huge page comes in at its first byte


def _populate_write(piece: Bytes) -> bool:
    madvise = ctypes.CDLL(None).madvise  # mmap.madvise would hold the GIL
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(piece.ctypes.data, len(piece), POPULATE_WRITE) == 0)


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _amount(nbytes: int | None) -> str:
    if nbytes is None:
        return "unlimited"
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"
