"""What a reply to a hostile request may be.

Owns: that judgement, for a reply that was read completely. Does not own: how requests are made or
sent, nor how long a reply may take.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# The Messages API has error objects of its own: no param, no code.
OTHER_ERRORS = "/v1/messages"


def fault(path: str, status: int, content_type: str, body: bytes, *, head: bool = False) -> str:
    """What is wrong with a reply; "" when nothing is. `head`: a HEAD request, without a body."""
    if status >= 500:
        return f"status {status}: {body[:300]!r}"
    if status >= 400:
        return "" if head else _error_fault(path, content_type, body)
    if content_type.startswith("text/event-stream"):
        return next(_stream_faults(body), "")
    if content_type.startswith("application/json") and not head:
        try:
            json.loads(body)
        except ValueError as error:
            return f"status {status} with broken JSON: {error}"
    return ""


def _error_fault(path: str, content_type: str, body: bytes) -> str:
    """An error is JSON with `error.message`, `type`, `param` and `code`, and is never empty."""
    if not content_type.startswith("application/json"):
        return f"an error of content type {content_type!r}: {body[:200]!r}"
    try:
        error = json.loads(body)["error"]
    except (ValueError, TypeError, KeyError):
        return f"an error without an error object: {body[:200]!r}"
    return _object_fault(error, ["message", "type"] if _is_other(path) else None)


def _is_other(path: str) -> bool:
    return path == OTHER_ERRORS or path.startswith((OTHER_ERRORS + "/", OTHER_ERRORS + "?"))


def _object_fault(error: Any, keys: list[str] | None = None) -> str:
    wanted = keys or ["message", "type", "param", "code"]
    if not isinstance(error, dict) or not set(wanted) <= error.keys():
        return f"an error object without {wanted}: {error!r}"
    if not all(isinstance(error[key], str) and error[key] for key in ("message", "type")):
        return f"an error object with an empty message or type: {error!r}"
    return ""


def _stream_faults(body: bytes) -> Iterator[str]:
    """A stream is whole events of JSON; an error in it is the server's own."""
    if body and not body.endswith(b"\n\n"):
        yield f"a stream was cut: {body[-100:]!r}"
    for line in body.decode("utf-8", "replace").split("\n"):
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        try:
            event = json.loads(line.removeprefix("data: "))
        except ValueError:
            yield f"an event that is no JSON: {line[:200]!r}"
            continue
        if isinstance(event, dict) and event.get("error"):
            yield f"an error in a stream: {line[:300]!r}"
