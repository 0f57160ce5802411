"""A batch as one value. Owns: its fields, how it is kept on disk and how it looks on the wire.

Does not own: what happens to it (`batches_run`). The files DIR/batches/<id>.json are these.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from moestro.errors import InvalidRequest
from moestro.server.files_disk import write_atomic

NANO = 10**9
ENDED = frozenset({"completed", "failed", "cancelled", "expired"})
WINDOW = re.compile(r"([1-9]\d{0,6})([smhd])")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST = 30 * 86400  # seconds
MOST_METADATA = 16


class LineError(msgspec.Struct, frozen=True):
    """What is wrong with the input. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Used(msgspec.Struct):
    """Tokens of all answers so far."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def add(self, usage: Any) -> None:
        """Count the `usage` of one answer, in the words of either API."""
        if not isinstance(usage, dict):
            return
        for given, made in (("prompt", "completion"), ("input", "output")):
            self.prompt += usage.get(f"{given}_tokens") or 0
            self.completion += usage.get(f"{made}_tokens") or 0
            details = usage.get(f"{given}_tokens_details") or {}
            self.cached += details.get("cached_tokens") or 0
            details = usage.get(f"{made}_tokens_details") or {}
            self.reasoning += details.get("reasoning_tokens") or 0


class Batch(msgspec.Struct, kw_only=True):
    """One batch. Times are wall clock, seconds. `output_id` and `error_id` name the files from the
    start; `has_output` and `has_errors` say that they are there for clients."""

    id: str
    owner: str
    made: int  # nanoseconds: also the order of lists
    endpoint: str
    input_file_id: str
    completion_window: str
    expires_at: int
    output_id: str
    error_id: str
    output_lifetime: int | None = None  # seconds
    metadata: dict[str, str] | None = None
    status: str = "validating"
    outcome: str | None = None  # what it ends as, once that is decided
    model: str | None = None
    errors: list[LineError] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    used: Used = msgspec.field(default_factory=Used)
    has_output: bool = False
    has_errors: bool = False
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def ended(self) -> bool:
        """Nothing will happen to it any more."""
        return self.status in ENDED

    def enter(self, status: str, now: int) -> None:
        """Take on a status; `now` in nanoseconds."""
        self.status = status
        if status != "validating":
            setattr(self, f"{status}_at", now // NANO)

    def save(self, folder: Path) -> None:
        """Keep it on disk. Blocks. Raises OSError."""
        write_atomic(folder / f"{self.id}.json", msgspec.json.encode(self))

    def json(self) -> dict[str, Any]:
        """The batch on the wire."""
        errors = [msgspec.structs.asdict(error) for error in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.made // NANO,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": {
                "input_tokens": self.used.prompt,
                "input_tokens_details": {"cached_tokens": self.used.cached},
                "output_tokens": self.used.completion,
                "output_tokens_details": {"reasoning_tokens": self.used.reasoning},
                "total_tokens": self.used.prompt + self.used.completion,
            },
            "metadata": self.metadata,
        }


def window_of(given: Any) -> int:
    """Seconds of a `completion_window` such as 24h. Raises InvalidRequest."""
    match = WINDOW.fullmatch(given) if isinstance(given, str) else None
    seconds = int(match[1]) * UNITS[match[2]] if match else 0
    if not 1 <= seconds <= LONGEST:
        raise InvalidRequest(
            "'completion_window' must be a time such as 24h, up to 30d.",
            param="completion_window",
        )
    return seconds


def metadata_of(given: Any) -> dict[str, str] | None:
    """`metadata` of a request. Raises InvalidRequest."""
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > MOST_METADATA:
        raise InvalidRequest(
            f"'metadata' must be an object of at most {MOST_METADATA} pairs.", param="metadata"
        )
    for key, value in given.items():
        if len(key) > 64 or not isinstance(value, str) or len(value) > 512:
            raise InvalidRequest(
                "'metadata' takes keys of up to 64 and text of up to 512 characters.",
                param="metadata",
            )
    return dict(given)
