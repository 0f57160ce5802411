"""Files read past the page cache: whole blocks, through page-aligned buffers.

Owns: the descriptor of one file with its way of reading, which byte ranges are read together, and
the buffers. Does not know what the bytes mean or where they go (`expert_cache.store` does).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moestro.errors import ModelError
from moestro.expert_cache.layout import Extent

BLOCK = 4096  # bytes; offsets and lengths of direct reads are multiples of it
PIECE = 16 << 20  # bytes of the longest single read; the kernel splits it and queues all parts

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Run:
    """Extents of one file that are read in one go, by offset: no whole block lies between them."""

    path: str
    offset: int
    nbytes: int
    extents: tuple[Extent, ...]


def join(extents: Iterable[Extent]) -> tuple[Run, ...]:
    """The runs of one expert."""
    runs: list[Run] = []
    for extent in sorted(extents, key=lambda extent: (extent.path, extent.offset)):
        end = extent.offset + extent.nbytes
        last = runs[-1] if runs else None
        if last and last.path == extent.path and extent.offset < last.offset + last.nbytes + BLOCK:
            reach = max(end, last.offset + last.nbytes) - last.offset
            runs[-1] = Run(last.path, last.offset, reach, (*last.extents, extent))
        else:
            runs.append(Run(extent.path, extent.offset, extent.nbytes, (extent,)))
    return tuple(runs)


class NotDirect(Exception):
    """The filesystem refuses a direct read."""


class File:
    """One open file. `direct` as long as its filesystem reads past the page cache."""

    def __init__(self, path: str, *, direct: bool) -> None:
        self.path = path
        self.direct = direct
        self.reason: str | None = None  # why it is not read directly though that was asked for
        try:
            self.fd = self._open(os.O_DIRECT if direct else 0)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self.fd = self._open(0)
            self._refused("open")

    def _open(self, more: int) -> int:
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | more)

    def give_up(self) -> None:
        """Read through the page cache from now on. Any thread, also while others read."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._refused("read")

    def _refused(self, call: str) -> None:
        self.direct = False
        self.reason = f"{self.path}: the filesystem refuses O_DIRECT ({call})"

    def pieces(self, run: Run, buffer: Bytes) -> Iterator[tuple[int, Bytes]]:
        """Offset and bytes of each part of `run` in turn, in `buffer` until the next is asked for.

        `NotDirect` if the filesystem does not want it, ModelError if the file cannot be read.
        """
        at, end = run.offset, run.offset + run.nbytes
        while at < end:
            base = at // BLOCK * BLOCK
            size = min(len(buffer), -(-(end - base) // BLOCK) * BLOCK)
            last = min(end, base + self._read(buffer[:size], base))
            if last <= at:
                raise cut_short(self.path, at, end - at)
            yield at, buffer[at - base : last - base]
            at = last

    def read(self, at: int, nbytes: int, buffer: Bytes) -> Bytes:
        """The bytes at `at`, one after the other, in `buffer`: page-aligned, `nbytes` and at least
        two blocks long. Reads through the page cache where the filesystem wants that.

        ModelError if the file cannot be read or ends before.
        """
        try:
            return self._whole(at, nbytes, buffer)
        except NotDirect:
            self.give_up()
            return self._whole(at, nbytes, buffer)

    def _whole(self, at: int, nbytes: int, buffer: Bytes) -> Bytes:
        base = at // BLOCK * BLOCK
        need = at + nbytes - base
        room = buffer[: -(-need // BLOCK) * BLOCK]
        done = 0
        while done < need:
            got = self._read(room[done:], base + done)
            if got == 0:
                raise cut_short(self.path, base + done, need - done)
            done += got
        return buffer[at - base : need]

    def _read(self, buffer: Bytes, at: int) -> int:
        try:
            return os.preadv(self.fd, [buffer.data], at)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise NotDirect from error
            raise unreadable(self.path, at, error) from error

    def close(self) -> None:
        """Close it. No read may be running."""
        os.close(self.fd)


class Buffers:
    """Page-aligned buffers of `nbytes`, as many as are in use at once; each serves any thread."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._idle: list[Bytes] = []

    @contextmanager
    def take(self) -> Iterator[Bytes]:
        """One buffer, for as long as the context is open."""
        try:
            buffer = self._idle.pop()
        except IndexError:
            buffer = aligned(self._nbytes)
        try:
            yield buffer
        finally:
            self._idle.append(buffer)

    def close(self) -> None:
        """Free those that are not in use."""
        self._idle.clear()


def aligned(nbytes: int) -> Bytes:
    """Fresh memory that starts at a page; unmapped when the last view of it is gone."""
    mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(mapping, np.uint8)


def buffer_bytes(runs: Iterable[Run]) -> int:
    """How large a buffer serves these runs: the longest of them, at most `PIECE`."""
    longest = max((run.nbytes for run in runs), default=0)
    return min(PIECE, -(-longest // BLOCK) * BLOCK + BLOCK)


def unreadable(path: str, at: int, error: OSError) -> ModelError:
    """A read failed."""
    return ModelError(f"cannot read {path} at offset {at}: {error.strerror}")


def cut_short(path: str, at: int, lacking: int) -> ModelError:
    """A file has become shorter than it was when it was opened."""
    return ModelError(
        f"{path} is cut short: it ends at offset {at}, {lacking} bytes before the end of what it "
        "should hold"
    )
