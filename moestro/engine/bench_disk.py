"""How fast a disk is read past the page cache.

Owns: the reads, and a scratch file where no file was named. Does not own: how checkpoints are read
(`expert_cache.store`).
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READERS = 4  # threads, each with a read of its own under way
PIECE = 8 << 20  # bytes of one read
ALIGNMENT = 4096  # of offsets and lengths of direct reads


@dataclass(frozen=True, slots=True)
class DiskFigures:
    """Bytes a second, or None; what was read or why not."""

    rate: float | None
    note: str


def read_disk(scratch: Path, file: Path | None, size: int) -> DiskFigures:
    """Read up to `size` bytes of `file`, or of a scratch file of that size in `scratch`."""
    try:
        if file is not None:
            return _read(file, size, str(file))
        with _scratch_file(scratch, size) as path:
            return _read(path, size, f"a scratch file in {scratch}")
    except OSError as error:
        where = file or scratch
        if error.errno == errno.EINVAL:
            return DiskFigures(None, f"the filesystem of {where} has no direct reads (O_DIRECT)")
        return DiskFigures(None, f"{where}: {error.strerror}")


def _read(path: Path, size: int, name: str) -> DiskFigures:
    size = min(size, path.stat().st_size) // ALIGNMENT * ALIGNMENT
    if not size:
        return DiskFigures(None, f"{name} is shorter than {ALIGNMENT} bytes")
    began = time.perf_counter()
    with ThreadPoolExecutor(READERS) as readers:
        done = sum(readers.map(lambda turn: _read_share(path, size, turn), range(READERS)))
    took = time.perf_counter() - began
    return DiskFigures(done / took, f"{done >> 20} MiB of {name}, {READERS} threads, O_DIRECT")


def _read_share(path: Path, size: int, turn: int) -> int:
    """Every READERS-th piece from number `turn` on; returns the bytes read."""
    buffer = mmap.mmap(-1, PIECE)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    done = 0
    try:
        for offset in range(turn * PIECE, size, READERS * PIECE):
            with memoryview(buffer) as view, view[: min(PIECE, size - offset)] as part:
                done += os.preadv(handle, [part], offset)
    finally:
        os.close(handle)
        buffer.close()
    return done


@contextmanager
def _scratch_file(folder: Path, size: int) -> Iterator[Path]:
    """A file of random bytes that is on the disk, gone afterwards."""
    handle, name = tempfile.mkstemp(prefix="moestro-bench-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            block = os.urandom(min(size, PIECE))
            for offset in range(0, size, len(block)):
                file.write(block[: size - offset])
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    finally:
        os.unlink(name)
