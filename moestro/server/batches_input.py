"""The input of a batch: JSON lines. Owns: what a line must be, and finding a line again.

Does not own: whether the request in a line can be served; that shows when it runs. Blocks: run it
in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from moestro.errors import MoestroError
from moestro.server.batches_state import LineError

MOST_LINES = 50_000  # requests of one batch
MOST_ERRORS = 100  # that are listed
LONGEST_ID = 512  # characters of a custom_id
BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """Where one request stands in the file."""

    number: int  # from 1
    offset: int  # bytes
    custom_id: str


@dataclass(slots=True)
class Input:
    """Everything found in one file."""

    lines: list[Line] = field(default_factory=list)
    errors: list[LineError] = field(default_factory=list)
    models: set[str] = field(default_factory=set)


class _Wrong(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def read_line(path: Path, line: Line) -> dict[str, Any]:
    """The body of one request of a file that was checked."""
    with path.open("rb") as file:
        file.seek(line.offset)
        body: dict[str, Any] = msgspec.json.decode(file.readline().removeprefix(BOM))["body"]
    return body


def check_input(
    path: Path, endpoint: str, longest: int, check_model: Callable[[str | None], str]
) -> Input:
    """Check every line. `longest` is bytes of one; `check_model` raises for what is not served."""
    found = Input()
    known: set[str] = set()
    for number, offset, raw in _lines(path, longest):
        try:
            if len(found.lines) == MOST_LINES:
                raise _Wrong("too_many_requests", f"A batch has at most {MOST_LINES} requests.")
            custom_id, model = _checked(raw, endpoint, longest, check_model)
            if custom_id in known:
                raise _Wrong(
                    "duplicate_custom_id", "Another line has the same custom_id.", "custom_id"
                )
        except _Wrong as wrong:
            found.errors.append(LineError(wrong.code, wrong.message, number, wrong.param))
            if len(found.errors) == MOST_ERRORS or wrong.code == "too_many_requests":
                return found
            continue
        known.add(custom_id)
        found.models.add(model)
        found.lines.append(Line(number, offset, custom_id))
    if not found.lines and not found.errors:
        found.errors.append(LineError("empty_file", "The input file has no requests."))
    return found


def _lines(path: Path, longest: int) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and bytes of each line; what is longer than `longest` comes cut."""
    with path.open("rb") as file:
        number = offset = 0
        while raw := file.readline(longest + 1):
            number += 1
            size, end = len(raw), raw
            while not end.endswith(b"\n") and (end := file.readline(longest + 1)):
                size += len(end)
            if raw.strip():
                yield number, offset, raw
            offset += size


def _checked(
    raw: bytes, endpoint: str, longest: int, check_model: Callable[[str | None], str]
) -> tuple[str, str]:
    """The custom_id and the model of one line. Raises _Wrong."""
    if len(raw) > longest:
        raise _Wrong("line_too_long", f"The line is over the limit of {longest} bytes.")
    try:
        value = msgspec.json.decode(raw.removeprefix(BOM))
    except (msgspec.DecodeError, RecursionError, ValueError):
        raise _Wrong("invalid_json_line", "The line is not valid JSON in UTF-8.") from None
    if not isinstance(value, dict):
        raise _Wrong("invalid_json_line", "The line must be a JSON object.")
    for name in ("custom_id", "method", "url", "body"):
        if value.get(name) is None:
            raise _Wrong("missing_required_parameter", f"'{name}' is required.", name)
    custom_id, body = value["custom_id"], value["body"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= LONGEST_ID:
        raise _Wrong(
            "invalid_custom_id",
            f"'custom_id' must be text of 1 to {LONGEST_ID} characters.",
            "custom_id",
        )
    if value["method"] != "POST":
        raise _Wrong("invalid_method", "'method' may only be POST.", "method")
    if value["url"] != endpoint:
        raise _Wrong("invalid_url", f"'url' must be the batch's endpoint, {endpoint}.", "url")
    if not isinstance(body, dict):
        raise _Wrong("invalid_body", "'body' must be an object.", "body")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise _Wrong("invalid_model", "'model' must be text.", "body.model")
    try:
        return custom_id, check_model(model)
    except MoestroError as error:
        raise _Wrong("model_not_found", error.message, "body.model") from None
