"""How log lines look and which of them are shown.

Owns: the one logging set-up of a process. Does not own what is logged: every module uses
`logging.getLogger(__name__)`, and none writes prompts or outputs.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

# Libraries that report every step at "info"; ours is the level that the user chose.
_QUIET = ("uvicorn", "uvicorn.error", "httpx", "httpcore", "huggingface_hub", "filelock")


class _Short(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()
        return super().format(record)


def setup(level: str = "info", process: str = "server", stream: TextIO | None = None) -> None:
    """Send log lines of `level` and above to `stream` (default: stderr), marked with `process`.

    Call it once in each process; a second call replaces the first.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Short(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    quiet = logging.DEBUG if level == "debug" else logging.WARNING
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(quiet, root.level))
