"""How log lines look and which of them are shown.

Owns: the one logging set-up of a process. Does not own what is logged: every module uses
`logging.getLogger(__name__)`, and none writes prompts or outputs, unless `--log-requests` asks
the server to.

A call may add `extra=about(request_id, trace)`: the text form shows them behind the message, the
JSON form as fields of their own.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

# Libraries that report every step at "info"; ours is the level that the user chose.
_QUIET = ("uvicorn", "uvicorn.error", "httpx", "httpcore", "huggingface_hub", "filelock")

Form = Literal["text", "json"]


def about(request_id: str | None = None, trace: str | None = None) -> dict[str, Any]:
    """What a log call's `extra` may hold: whose request it is, and where an exception came from.

    `trace` is for exceptions whose own text may hold what the user wrote; others use `exc_info`.
    """
    return {"request_id": request_id, "trace": trace}


class _Short(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()
        text = super().format(record)
        if request_id := getattr(record, "request_id", None):
            text += f" [{request_id}]"
        if trace := getattr(record, "trace", None):
            text += f"\n{trace.rstrip()}"
        return text


class _Json(logging.Formatter):
    """One object on one line; fields that a line does not have are left out."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        trace = getattr(record, "trace", None)
        if record.exc_info:
            trace = self.formatException(record.exc_info)
        fields = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None),
            "exception": trace,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None})


def setup(
    level: str = "info",
    process: str = "server",
    stream: TextIO | None = None,
    form: Form = "text",
) -> None:
    """Send log lines of `level` and above to `stream` (default: stderr), marked with `process`.

    Call it once in each process; a second call replaces the first.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json(process) if form == "json" else _Short(process))
    logging.getLogger().handlers[:] = [handler]
    set_level(level)


def set_level(level: str) -> None:
    """Change which lines are shown."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    quiet = logging.DEBUG if level == "debug" else logging.WARNING
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(quiet, root.level))
