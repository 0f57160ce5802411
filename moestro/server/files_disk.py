"""Bytes that must survive a crash. Owns: atomic writes, the lock of a folder, and lines that are
appended whole or not at all. Everything here blocks: call it in a thread when it may take long.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from moestro.errors import ConfigError

PRIVATE_FOLDER = 0o700  # what users send and models say is nobody else's business
PRIVATE_FILE = 0o600


def make_folder(path: Path) -> Path:
    """Make a private folder, unless it is there. Raises OSError."""
    path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    return path


def lock(folder: Path) -> int:
    """Claim a folder for this process; closing the descriptor that is returned gives it back.

    Raises ConfigError when another server has it: two would run the same batches.
    """
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise ConfigError(
            f"--files-dir {folder}: another server uses it", param="files_dir"
        ) from None
    return handle


def create(path: Path) -> BinaryIO:
    """Open a new private file for writing. Raises OSError, also when it exists."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE), "wb")


def write_atomic(path: Path, data: bytes) -> None:
    """Put `data` at `path`, durable, whole or not at all. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)
        with create(temporary) as file:
            file.write(data)
            sync(file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync(file: BinaryIO) -> None:
    """Make what was written durable. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make new and removed names durable. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class LineLog:
    """A file of lines. What is after the last newline when it is opened was cut by a crash."""

    def __init__(self, path: Path) -> None:
        """Open or make the file, and cut off a torn line. Raises OSError."""
        self.path = path
        new = not path.exists()
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        self.size = self._whole(os.fstat(self._handle).st_size)  # bytes
        os.ftruncate(self._handle, self.size)
        if new:
            sync_folder(path.parent)

    def lines(self) -> Iterator[bytes]:
        """Read the lines from the start, one at a time."""
        with self.path.open("rb") as file:
            yield from file

    def append(self, lines: Sequence[bytes]) -> None:
        """Add lines, each with its newline, durable. Raises OSError, and then none was added."""
        data = memoryview(b"".join(lines))
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._handle, data[done:], self.size + done)
            os.fsync(self._handle)
        except OSError:
            os.ftruncate(self._handle, self.size)
            raise
        self.size += done

    def close(self) -> None:
        """Close the file. Once only."""
        os.close(self._handle)

    def _whole(self, size: int) -> int:
        """Bytes up to and with the last newline."""
        step = 1 << 16
        end = size
        while end > 0:
            start = max(0, end - step)
            found = os.pread(self._handle, end - start, start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return 0
