"""JSON in and out. Owns: which bytes are accepted as JSON and how replies are spelled.

Replies are pure ASCII, because U+2028 and its like inside a line break clients that split on them.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii
from typing import Any

import msgspec
from starlette.responses import Response

from moestro.errors import InvalidRequest

BOM = b"\xef\xbb\xbf"
JSON_TYPES = ("application/json", "text/plain", "")
DONE = "data: [DONE]\n\n"  # what ends a stream of completions


def quote(text: str) -> str:
    """Return `text` as a JSON string literal in ASCII."""
    return encode_basestring_ascii(text)


def dump(value: Any) -> str:
    """Return `value` as one line of ASCII JSON."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def event(value: dict[str, Any]) -> str:
    """Return a server-sent event that is named after the value's `type`."""
    return f"event: {value['type']}\ndata: {dump(value)}\n\n"


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(dump(value), status, headers, media_type="application/json")


def parse(body: bytes, content_type: str | None) -> dict[str, Any]:
    """Return the JSON object in a request body.

    Raises `InvalidRequest` for another content type, for anything that is not UTF-8 JSON (a lone
    surrogate, NaN and too deep nesting included) and for JSON that is not an object.
    """
    media = (content_type or "").partition(";")[0].strip().lower()
    if media not in JSON_TYPES and not media.endswith("+json"):
        raise InvalidRequest("The content-type header must be application/json.")
    try:
        value = msgspec.json.decode(body.removeprefix(BOM))
    except (msgspec.DecodeError, RecursionError, ValueError) as exc:
        raise InvalidRequest("The request body is not valid JSON in UTF-8.") from exc
    if not isinstance(value, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return value
