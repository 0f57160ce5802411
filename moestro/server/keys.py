"""The keys that are accepted now. Owns: the key file's format, and reading it again.

Does not own: comparing (`auth`), or when to read again (the command line's signal). No message
here shows any part of a key.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moestro.errors import ConfigError
from moestro.server.auth import check_key, hash_key

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Key:
    """One accepted key. `name` is for people; empty when it has none."""

    digest: bytes = field(repr=False)
    name: str = ""


class KeyRing:
    """Keys given once, and those of a file."""

    def __init__(self, fixed: Sequence[bytes] = (), file: Path | None = None) -> None:
        """`fixed` are digests. Raises ConfigError when the file cannot be used."""
        self._fixed = tuple(Key(digest) for digest in fixed)
        self._file = file
        self._keys = self._read()

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, headers: Iterable[tuple[bytes, bytes]]) -> Key:
        """The key that a request carries. Raises `BadKey`."""
        keys = self._keys
        return keys[check_key(headers, [key.digest for key in keys])]

    def reload(self) -> None:
        """Read the file again. A file that cannot be used changes nothing, and is logged."""
        try:
            self._keys = self._read()
        except ConfigError as error:
            log.error("%s; the keys stay as they were", error.message)
        else:
            log.info("%d API keys are accepted now", len(self._keys))

    def _read(self) -> tuple[Key, ...]:
        return self._fixed if self._file is None else (*self._fixed, *read_keys(self._file))


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file: one a line, `key` or `name:key`; empty lines and `#` lines do not count.

    Raises ConfigError that names the flag, the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise _refused(f"{path}: {reason}") from None
    keys = tuple(
        _parse(line.strip(), f"{path} line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.strip().startswith("#")
    )
    if not keys:
        raise _refused(f"{path}: it holds no keys")
    return keys


def _parse(line: str, where: str) -> Key:
    before, colon, after = line.partition(":")
    name, key = (before.strip(), after.strip()) if colon else ("", line)
    if colon and NAME.fullmatch(name) is None:
        raise _refused(f"{where}: a name is up to 64 letters, digits and _ . -, then a colon")
    if not key or not key.isprintable() or any(c.isspace() for c in key):
        raise _refused(f"{where}: a key is one word of printable characters")
    return Key(hash_key(key), name)


def _refused(message: str) -> ConfigError:
    return ConfigError(f"--api-key-file {message}", param="api_key_file")
