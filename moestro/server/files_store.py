"""The files of /v1/files on disk. Owns: the folder, the index of it, whose file is whose, and how
much there is in all. Does not own: the wire (`files`), or what is in a file.

    DIR/.lock                   one server at a time
    DIR/files/<id>.data         the bytes
    DIR/files/<id>.json         the rest; a file exists for clients when this does

Ids are made here. What a client sends as an id is only looked up in the index, so that it never
becomes part of a path.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from moestro.errors import ConfigError, InvalidRequest, NotFound
from moestro.server.files_disk import lock, make_folder, sync_folder, write_atomic
from moestro.server.keys import Key

NANO = 10**9
NOBODY = ""  # the owner of everything on a server without keys


class StoredFile(msgspec.Struct, frozen=True):
    """What is known of a file beside its bytes."""

    id: str
    owner: str  # see `owner_of`
    bytes: int
    made: int  # wall clock, nanoseconds: also the order of lists
    filename: str  # as the client called it; only ever shown
    purpose: str
    expires_at: int | None = None  # wall clock, seconds

    @property
    def created_at(self) -> int:
        """Wall clock, seconds."""
        return self.made // NANO


def owner_of(key: Key | None) -> str:
    """Whose files a request may see. Nothing here lets anybody use or recognize the key.

    A named key stands for its name, so that its files outlive a change of the key.
    """
    if key is None:
        return NOBODY
    if key.name:
        return f"name:{key.name}"
    return "key:" + hashlib.sha256(b"moestro files\0" + key.digest).hexdigest()[:32]


class FileStore:
    """All files under one folder. Methods are quick, unless they say that they block."""

    def __init__(
        self,
        root: Path,
        *,
        max_file: int,
        quota: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`max_file` and `quota` are bytes, of one file and of all. Blocks. Raises ConfigError."""
        self.root = root
        self.max_file = max_file
        self._quota = quota
        self._clock = clock
        self._known: dict[str, StoredFile] = {}
        self._pins: dict[str, str] = {}  # file -> the batch that needs it
        self.used = 0  # bytes, uploads under way included
        try:
            self._folder = make_folder(make_folder(root) / "files")
            self._lock = lock(root)
        except OSError as error:
            raise ConfigError(
                f"--files-dir {root}: {error.strerror or error}", param="files_dir"
            ) from None
        self._read()

    @property
    def now(self) -> int:
        """Wall clock, nanoseconds."""
        return int(self._clock() * NANO)

    def new_id(self) -> str:
        """An id that no file has."""
        return f"file-{secrets.token_hex(12)}"

    def path(self, id: str) -> Path:
        """Where the bytes of one of our own ids are or will be."""
        return self._folder / f"{id}.data"

    def get(self, id: str, owner: str) -> StoredFile:
        """Look a file up. Raises NotFound, also for what belongs to somebody else."""
        found = self._known.get(id)
        if found is None or found.owner != owner or self._expired(found):
            raise NotFound("No such file.", param="file_id")
        return found

    def files_of(self, owner: str) -> list[StoredFile]:
        """All files of an owner, oldest first. Removes those that have expired."""
        self.sweep()
        found = [file for file in self._known.values() if file.owner == owner]
        return sorted(found, key=lambda file: (file.made, file.id))

    def add(self, file: StoredFile) -> None:
        """Make a file known whose bytes are at `path` and durable. Blocks. Raises OSError."""
        write_atomic(self._folder / f"{file.id}.json", msgspec.json.encode(file))
        if file.id not in self._known:
            self.used += file.bytes
        self._known[file.id] = file

    def delete(self, file: StoredFile) -> None:
        """Remove a file. Blocks. Raises InvalidRequest while a batch needs it."""
        user = self._pins.get(file.id)
        if user is not None:
            raise InvalidRequest(
                f"The file is the input of {user}, which has not ended; cancel that first.",
                param="file_id",
            )
        self._known.pop(file.id, None)
        (self._folder / f"{file.id}.json").unlink(missing_ok=True)
        self.path(file.id).unlink(missing_ok=True)
        sync_folder(self._folder)
        self.used -= file.bytes

    def grow(self, size: int) -> None:
        """Claim `size` bytes more. Raises InvalidRequest when they would be over the quota."""
        if self.used + size > self._quota:
            raise InvalidRequest(
                f"The files here hold {self.used} of at most {self._quota} bytes (--files-quota); "
                "delete some first.",
                param="file",
                code="files_quota_exceeded",
            )
        self.used += size

    def shrink(self, size: int) -> None:
        """Give claimed bytes back."""
        self.used -= size

    def pin(self, id: str, batch: str) -> None:
        """Keep a file until `unpin`."""
        self._pins[id] = batch

    def unpin(self, id: str, batch: str) -> None:
        """The batch has ended. Harmless when another one needs the file too."""
        if self._pins.get(id) == batch:
            del self._pins[id]

    def sweep(self) -> None:
        """Remove what has expired. Blocks when there is something."""
        for file in [file for file in self._known.values() if self._expired(file)]:
            if file.id not in self._pins:
                self.delete(file)

    def drop_strays(self, reserved: set[str]) -> None:
        """Remove bytes without a description, but for `reserved` ids: uploads that were cut."""
        for path in self._folder.iterdir():
            if path.stem not in self._known and path.stem not in reserved:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the folder back. Harmless when done before."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _expired(self, file: StoredFile) -> bool:
        return file.expires_at is not None and self._clock() >= file.expires_at

    def _read(self) -> None:
        for path in self._folder.glob("file-*.json"):
            try:
                file = msgspec.json.decode(path.read_bytes(), type=StoredFile)
            except (OSError, msgspec.DecodeError) as error:
                os.close(self._lock)
                raise ConfigError(f"--files-dir: {path}: {error}", param="files_dir") from None
            if file.id == path.stem and self.path(file.id).exists():
                self._known[file.id] = file
                self.used += file.bytes
